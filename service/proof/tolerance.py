"""How far two correct computations of a logit may differ: the variances derived in docs/tolerance.md.

Imports torch: import it lazily. Everything follows from the dtype, the weights and the stored states.

Legend: H hidden size.
"""

from dataclasses import dataclass

import torch

_FLOAT32_ROUNDOFF = 2.0**-24


@dataclass(frozen=True, slots=True)
class NormedState:
    """Stored states and their final norm; all tensors are [..., H], float32.

    `stored` is the state before the norm and `normed` the norm's result, rounded to the dtype. `unit` is the
    centred state divided by its root mean square, `gain` the norm's weight divided by it. `half` is how far
    each captured value may be from the stored one, None if they are equal. `centres` says whether the norm
    subtracts the mean.
    """

    stored: torch.Tensor
    normed: torch.Tensor
    unit: torch.Tensor
    gain: torch.Tensor
    half: torch.Tensor | None
    centres: bool


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Variances of values computed from `state`; a direction is a gradient [..., H] w.r.t. the normed state.

    `roundoff` is the dtype's unit roundoff, `logit_roundings` is how often a logit is rounded to the dtype.
    """

    state: NormedState
    roundoff: float
    logit_roundings: int

    @property
    def rounding(self) -> float:
        """Variance of one rounding to the dtype, relative to the square of the rounded value."""
        return self.roundoff**2 / 3

    def of_product(self, direction: torch.Tensor) -> torch.Tensor:
        """Return the variance [...] of the normed state's product with `direction`."""
        normed = self.state.normed
        share = self.state.stored * self.state.gain
        elements = (direction.square() * (share.square() + 3 * normed.square())).sum(dim=-1)
        divisor = (direction * normed).sum(dim=-1).square()
        variance = self.rounding * (elements + divisor)
        if self.state.half is not None:
            variance = variance + self._of_storing(direction, self.state.half)
        return variance

    def of_logit(self, logit: torch.Tensor, direction: torch.Tensor) -> torch.Tensor:
        """Return the variance [...] of computing one logit, whose gradient is `direction`."""
        spread = (direction * self.state.normed).square().sum(dim=-1)
        in_dtype = self.rounding * (self.logit_roundings * logit.square() + spread)
        in_float32 = 2 * direction.shape[-1] * _FLOAT32_ROUNDOFF**2 * (logit.square() + spread)
        return in_dtype + in_float32

    def _of_storing(self, direction: torch.Tensor, half: torch.Tensor) -> torch.Tensor:
        """Return the variance [...] that storing adds to a product with `direction`.

        The errors of storing are at most `half`.
        """
        error = self._slope(direction) * half
        lost = self.state.stored == 0
        known = error.masked_fill(lost, 0.0).square().sum(dim=-1) / 3
        return known + error.masked_fill(~lost, 0.0).abs().sum(dim=-1).square()

    def _slope(self, direction: torch.Tensor) -> torch.Tensor:
        """Return the product's derivative [..., H] with respect to each stored value."""
        slope = direction * self.state.gain
        along = (slope * self.state.unit).mean(dim=-1, keepdim=True)
        if self.state.centres:
            slope = slope - slope.mean(dim=-1, keepdim=True)
        return slope - along * self.state.unit
