"""The fixed bins that tokens are counted in: norms by their leading bits, places in a row by octaves.

A float's leading bits make sixteen bins an octave, each as wide as the others. A bin holds eight bfloat16
numbers, so rounding a norm to bfloat16 leaves no comb in a histogram.

Imports torch: import it lazily.

Legend: T tokens, B bins.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

_BITS_AN_OCTAVE = 4
_BFLOAT16_BITS, _BFLOAT16_BIAS = 7, 127
_LOW, _HIGH = -20, 44
"""Powers of two; the norms of states that models make lie far inside."""
_FIRST = (_LOW + _BFLOAT16_BIAS) << _BITS_AN_OCTAVE
BINS = ((_HIGH - _LOW) << _BITS_AN_OCTAVE) + 2
"""The first bin counts what is smaller, zero above all, the last what is larger or not finite."""

_SINGLE_PLACES = 4
PLACES = 24
"""Tokens 0 to 3, of which models make massive ones, then an octave each; the last takes all that is left."""


def norm_bins(norm_T: torch.Tensor) -> NDArray[np.int64]:
    """Return the bin of each norm, bfloat16 or float32, none negative."""
    leading_T = norm_T.view(torch.uint16).numpy()
    if norm_T.dtype == torch.float32:
        leading_T = leading_T[1::2]
    number_T: NDArray[np.int64] = (leading_T >> (_BFLOAT16_BITS - _BITS_AN_OCTAVE)).astype(np.int64)
    return (number_T - (_FIRST - 1)).clip(0, BINS - 1)


def bin_edge(number: int) -> float:
    """Return the norm at which bin `number` begins; it is neither the first nor behind the last."""
    octave, part = divmod(number - 1, 1 << _BITS_AN_OCTAVE)
    return float(2.0 ** (_LOW + octave) * (1 + part / (1 << _BITS_AN_OCTAVE)))


def place_of(token_T: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the place of each token number."""
    octave_T = np.frexp(token_T)[1].astype(np.int64) + 1
    place_T: NDArray[np.int64] = np.where(token_T < _SINGLE_PLACES, token_T, octave_T)
    return place_T.clip(max=PLACES - 1)


def place_begin(place: int) -> int:
    """Return the first token number of a place."""
    return int(place if place < _SINGLE_PLACES else 2 ** (place - 2))


def quantiles(counts_B: NDArray[np.int64], shares: Sequence[float]) -> list[float]:
    """Return the norms below which `shares` of the counted tokens lie.

    0 where that falls into the first bin, infinity in the last, NaN where nothing was counted.
    """
    total = int(counts_B.sum())
    if not total:
        return [float("nan")] * len(shares)
    below_B = np.cumsum(counts_B)
    return [_quantile(counts_B, below_B, share * total) for share in shares]


def _quantile(counts_B: NDArray[np.int64], below_B: NDArray[np.int64], wanted: float) -> float:
    number = int(np.searchsorted(below_B, wanted))
    if number in (0, BINS - 1):
        return 0.0 if number == 0 else float("inf")
    low, high = bin_edge(number), bin_edge(number + 1)
    count = int(counts_B[number])
    return low + (high - low) * (wanted - float(below_B[number] - count)) / count
