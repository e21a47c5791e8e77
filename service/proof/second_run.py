"""The second run: compares a row's states with those of the same tokens, computed once more. No I/O.

The canary's prompts have the engine to themselves, while the rows of a unit share its batches, find their
beginnings in the prefix cache, are computed in pieces, and answers token by token. An engine that goes wrong
only then is wrong in the row and right in the second run by itself, or the reverse where the row was computed
by itself and runs again beside others. Only the first of an engine runs in both ways: a later one detects
what depends on the batch. The bounds follow from the canary: how far a token may be off, and how many may be
further off, since what two libraries differ by is more than what two batches of one engine should.

Imports torch: import it lazily.

Legend: T tokens, H hidden size.
"""

import math
from dataclasses import dataclass
from itertools import pairwise

import torch

from schemas.dataset.manifest import LayerAgreement
from schemas.dataset.states import is_lossy
from schemas.identity import Identity
from service.errors import StatesWrong
from service.proof.canary import JUDGED_TOKENS, most_scale, most_stretch, second_run_bound

_UNSEEN = 3 / 287
"""Of tokens below the bound, if the canary had none: by the rule of three, with 95% confidence.

It compares 405 tokens, 287 of them distinct, because its prompts begin alike.
"""
_DEVIATIONS = 6.0
"""By which a piece may have more tokens below the bound than expected: a false alarm costs an engine."""
_CLUSTERED = 3.0
"""Flips come in clusters: in random mixtures of experts the variance was 1.4 to 3.6 times the mean."""
_CURE = "the engine's states depend on what else is in its batch: report it, with its version and options"


@dataclass(frozen=True, slots=True)
class LayerBound:
    """What two runs of one layer may differ by: a token's least cosine, and the share of tokens below it."""

    layer_id: int
    cosine: float
    misfits: float

    def most_misfits(self, num_tokens: int) -> int:
        """Return how many tokens of a piece may be below the cosine, as those whose router flips.

        It may be one token of a short piece, but not all.
        """
        expected = (self.misfits + _UNSEEN) * num_tokens
        variance = (_CLUSTERED * self.misfits + _UNSEEN) * num_tokens
        by_chance = expected + _DEVIATIONS * math.sqrt(variance)
        return min(max(int(by_chance), 1), num_tokens - 1)


def layer_bound(identity: Identity, agreement: LayerAgreement) -> LayerBound:
    """Return the bound for a layer. What is stored as fp8 is as exact as bfloat16 at best."""
    cosine = second_run_bound("bfloat16" if is_lossy(identity) else identity.dtype, agreement.cosine)
    return LayerBound(agreement.layer_id, cosine, agreement.misfits)


def compare(
    where: str,
    bound: LayerBound,
    first_TH: torch.Tensor,
    second_TH: torch.Tensor,
    *,
    begin: int = 0,
    answer_begin: int = 0,
) -> float:
    """Compare one layer's states of one row, [T, H] each; return the least of its pieces' median cosines.

    A piece has as many tokens as of a canary's prompt are compared, or down to half as many, so that one
    block of wrong ones is no small share of it. An answer of two tokens or more has pieces of its own.

    `begin` is the first token's place in its row, `answer_begin` that of the first token of its answer.

    Raises StatesWrong if too many tokens of a piece differ in direction or length.
    """
    medians = []
    for part in _pieces(len(first_TH), answer_begin - begin):
        first, second = first_TH[part].double(), second_TH[part].double()
        tokens = f"the {len(first)} tokens from {begin + part.start} on"
        # A padding token's embedding may be zero, and has no direction.
        equal_T = (first == second).all(dim=1)
        cosine_T = torch.cosine_similarity(first, second, dim=1).masked_fill(equal_T, 1.0)
        size_T = torch.linalg.vector_norm(second, dim=1).clamp_min(torch.finfo(torch.float64).tiny)
        length_T = (torch.linalg.vector_norm(first, dim=1) / size_T).masked_fill(equal_T, 1.0)
        stretch_T = (length_T - 1).abs()
        fits_T = (cosine_T >= bound.cosine) & (stretch_T <= most_stretch(bound.cosine))
        wrong = int((~fits_T).sum())
        if wrong > bound.most_misfits(len(first)):
            cosine, stretch = float(cosine_T[~fits_T].median()), float(stretch_T[~fits_T].median())
            raise StatesWrong(
                f"{where}: computed a second time, layer {bound.layer_id} has other states for {wrong} of "
                f"{tokens}: median cosine {cosine:.4f}, expected at least {bound.cosine:.4f}, and "
                f"{stretch:.0%} off in length",
                field="layers",
                cure=_CURE,
            )
        # Of two tokens the median is the lower, which one whose router flipped would be.
        scale = float(length_T[fits_T].median())
        if not abs(scale - 1) <= most_scale(bound.cosine):
            raise StatesWrong(
                f"{where}: layer {bound.layer_id} is {scale:.3g} times as large as computed a second time in "
                f"{tokens}",
                field="layers",
                cure=_CURE,
            )
        medians.append(float(cosine_T.median()))
    return min(medians)


def _pieces(num_tokens: int, answer_begin: int) -> list[slice]:
    """Return the pieces that are compared; a single token is no piece of its own, unless it is the row."""
    between = [answer_begin] if 1 < answer_begin < num_tokens - 1 else []
    pieces = []
    for begin, end in pairwise([0, *between, num_tokens]):
        count = -(-(end - begin) // JUDGED_TOKENS)
        cuts = [begin + (end - begin) * number // count for number in range(count + 1)]
        pieces += [slice(*cut) for cut in pairwise(cuts)]
    return pieces
