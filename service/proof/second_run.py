"""The second run: compares a row's states with those of the same tokens, computed once more. No I/O.

The canary's prompts have the engine to themselves, while the rows of a unit share its batches, find their
beginnings in the prefix cache, are computed in pieces, and answers token by token. An engine that goes wrong
only then is wrong in the row and right in the second run. Only the first of an engine has it to itself, too:
a later one detects what depends on the batch. The bounds are the canary's: what two libraries may differ by
is more than what two batches of one engine may.

Imports torch: import it lazily.

Legend: T tokens, H hidden size.
"""

import math
from dataclasses import dataclass

import torch

from schemas.dataset.manifest import LayerAgreement
from schemas.dataset.states import is_lossy
from schemas.identity import Identity
from service.errors import StatesWrong
from service.proof.canary import JUDGED_TOKENS, MIN_COSINE, MIN_TOKENS, most_scale, most_stretch

_FURTHER = 4.0
"""One less the cosine grows with the square of the distance: this allows twice the canary's distance."""
_DEVIATIONS = 6.0
"""Standard deviations of the number of tokens below the bound: more are seen once in a million pieces."""
_CURE = "the engine's states depend on what else is in its batch: report it, with its version and options"


@dataclass(frozen=True, slots=True)
class LayerBound:
    """What two runs of one layer may differ by: a token's least cosine, and the share of tokens below it."""

    layer_id: int
    cosine: float
    misfits: float

    def most_misfits(self, num_tokens: int) -> int:
        """Return how many tokens of a piece may be below the cosine.

        As many as in the canary's prompts, and one of a short piece: one whose router flips may be a fifth of
        its tokens, but not all. More if the model's routers flipped in the canary, as they may here.
        """
        expected = self.misfits * num_tokens
        by_chance = expected + _DEVIATIONS * math.sqrt(expected)
        return int(max((1 - MIN_TOKENS) * num_tokens, by_chance, min(1, num_tokens - 1)))


def layer_bound(identity: Identity, agreement: LayerAgreement) -> LayerBound:
    """Return the bound for a layer: that of the dtype, or a wider one if the canary was further off.

    An engine that rounds its inputs to 8 bits may be further from the reference than the dtype explains. What
    is stored as fp8 is as exact as bfloat16 at best.
    """
    cosine = MIN_COSINE["bfloat16" if is_lossy(identity) else identity.dtype]
    cosine = min(cosine, 1 - _FURTHER * (1 - agreement.cosine))
    return LayerBound(agreement.layer_id, cosine, agreement.misfits)


def compare(where: str, bound: LayerBound, first_TH: torch.Tensor, second_TH: torch.Tensor) -> float:
    """Compare one layer's states of one row, [T, H] each; return the least of its pieces' median cosines.

    A piece has as many tokens as of a canary's prompt are compared, or down to half as many, so that one
    block of wrong ones is no small share of it.

    Raises StatesWrong if too many tokens of a piece differ in direction or length.
    """
    medians = []
    pieces = -(-len(first_TH) // JUDGED_TOKENS)
    begin = 0
    for one, other in zip(first_TH.tensor_split(pieces), second_TH.tensor_split(pieces), strict=True):
        first, second = one.double(), other.double()
        cosine_T = torch.cosine_similarity(first, second, dim=1)
        size_T = torch.linalg.vector_norm(second, dim=1).clamp_min(torch.finfo(torch.float64).tiny)
        # A padding token's embedding may be zero, and has no direction.
        equal_T = (one == other).all(dim=1)
        cosine_T = cosine_T.masked_fill(equal_T, 1.0)
        length_T = (torch.linalg.vector_norm(first, dim=1) / size_T).masked_fill(equal_T, 1.0)
        stretch_T = (length_T - 1).abs()
        fits_T = (cosine_T >= bound.cosine) & (stretch_T <= most_stretch(bound.cosine))
        wrong = int((~fits_T).sum())
        if wrong > bound.most_misfits(len(fits_T)):
            cosine, stretch = float(cosine_T[~fits_T].median()), float(stretch_T[~fits_T].median())
            raise StatesWrong(
                f"{where}: computed a second time, layer {bound.layer_id} has other states for {wrong} of "
                f"the {len(fits_T)} tokens from {begin} on: median cosine {cosine:.4f}, expected at "
                f"least {bound.cosine:.4f}, and {stretch:.0%} off in length",
                field="layers",
                cure=_CURE,
            )
        scale = float(length_T.median())
        if not abs(scale - 1) <= most_scale(bound.cosine):
            raise StatesWrong(
                f"{where}: layer {bound.layer_id} is {scale:.3g} times as large as computed a second time in "
                f"{len(fits_T)} tokens from {begin} on",
                field="layers",
                cure=_CURE,
            )
        medians.append(float(cosine_T.median()))
        begin += len(fits_T)
    return min(medians)
