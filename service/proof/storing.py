"""How far logits may move because states were stored in less precision than they were captured in.

Imports torch: import it lazily. All follows from what is stored; nothing is fitted to data.

A captured value lies within half a step h_j of the stored one, x_j, anywhere there: a uniform error, of
variance h_j^2/3. What was stored as zero keeps no sign, so its errors may conspire: sum_j |a_j| h_j bounds
them.

Through the norm, with u = the centred state over its root mean square, g = the norm's weight over that root,
and H elements, a product d . y of the normed state moves with x_j by

    a_j = d_j g_j - mean(d g) - (d . w u) u_j / (H r),   r the root mean square,

where the middle term is a layernorm's alone, and w u the normed state before its bias.

Legend: N rows, H hidden size.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Storing:
    """The variances that storing gives to what is computed of states; all tensors are [..., H], float32.

    `lost` are values that were stored as zero, `half` how far a captured value may lie from the stored one,
    `unit` the centred states over their root mean square, `gain` the norm's weight over it; `centres` says
    whether the norm takes the mean away.
    """

    lost: torch.Tensor
    half: torch.Tensor
    unit: torch.Tensor
    gain: torch.Tensor
    centres: bool

    def of_product(self, direction: torch.Tensor) -> torch.Tensor:
        """Return the variance [...] of the normed state's product with `direction` [..., H]."""
        off = self._slope(direction) * self.half
        known = off.masked_fill(self.lost, 0.0).square().sum(dim=-1) / 3
        return known + off.masked_fill(~self.lost, 0.0).abs().sum(dim=-1).square()

    def of_softmax(self, mean_NH: torch.Tensor, square_NH: torch.Tensor) -> torch.Tensor:
        """Return what the softmax's curve adds to the variance of a log-probability [N].

        Its second order is q, half the variance over the vocabulary of what the logits move by: on average
        half of sum_j g_j^2 (E w_j^2 - (E w_j)^2) h_j^2/3 over the softmax, w the head's rows as it weighs
        them. That is `square_NH` less the square of `mean_NH`. A square of Gaussians has a mean square of at
        most three times its squared mean. Moving the norm's divisor scales all logits; that is in the first
        order already.
        """
        spread_NH = (square_NH - mean_NH.square()).clamp(min=0.0)
        bend_N = (spread_NH * (self.gain * self.half).square()).sum(dim=-1) / 6
        return 3 * bend_N.square()

    def _slope(self, direction: torch.Tensor) -> torch.Tensor:
        """Return by how much the product moves with each stored value."""
        each = direction * self.gain
        along = (each * self.unit).mean(dim=-1, keepdim=True)
        if self.centres:
            each = each - each.mean(dim=-1, keepdim=True)
        return each - along * self.unit
