"""How far two right computations of a logit may differ: the variances that docs/tolerance.md derives.

Imports torch: import it lazily. Everything follows from the dtype, the weights and what is stored.

Legend: H hidden size.
"""

from dataclasses import dataclass

import torch

_FLOAT32_ROUNDOFF = 2.0**-24


@dataclass(frozen=True, slots=True)
class NormedState:
    """Stored states and what the final norm makes of them; all tensors are [..., H], float32.

    `stored` is the state before the norm and `normed` the norm's result, rounded to the dtype. `unit` is the
    centred state over its root mean square, `gain` the norm's weight over that root. `half` is how far each
    captured value may lie from the stored one, null where they are the same. `centres` says whether the norm
    takes the mean away.
    """

    stored: torch.Tensor
    normed: torch.Tensor
    unit: torch.Tensor
    gain: torch.Tensor
    half: torch.Tensor | None
    centres: bool


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Variances of what is computed of `state`; a direction is the gradient [..., H] by the normed state.

    `roundoff` is the dtype's unit roundoff, `logit_roundings` is how often a logit is rounded to the dtype.
    """

    state: NormedState
    roundoff: float
    logit_roundings: int

    @property
    def rounding(self) -> float:
        """Variance of one rounding to the dtype, relative to the square of what is rounded."""
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
        """Return the variance [...] of one logit by itself, `direction` being its gradient."""
        spread = (direction * self.state.normed).square().sum(dim=-1)
        in_dtype = self.rounding * (self.logit_roundings * logit.square() + spread)
        in_float32 = 2 * direction.shape[-1] * _FLOAT32_ROUNDOFF**2 * (logit.square() + spread)
        return in_dtype + in_float32

    def _of_storing(self, direction: torch.Tensor, half: torch.Tensor) -> torch.Tensor:
        """Return the variance [...] that storing with `half` steps gives to a product with `direction`."""
        error = self._slope(direction) * half
        lost = self.state.stored == 0
        known = error.masked_fill(lost, 0.0).square().sum(dim=-1) / 3
        return known + error.masked_fill(~lost, 0.0).abs().sum(dim=-1).square()

    def _slope(self, direction: torch.Tensor) -> torch.Tensor:
        """Return the product's derivative [..., H] by each stored value."""
        slope = direction * self.state.gain
        along = (slope * self.state.unit).mean(dim=-1, keepdim=True)
        if self.state.centres:
            slope = slope - slope.mean(dim=-1, keepdim=True)
        return slope - along * self.state.unit
