"""Statistics of one layer's states, collected as `quarry verify` reads them: about 0.1 ms per row and layer.

Imports torch: import it lazily.

Legend: T tokens, H hidden size, P places in a row, B bins.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

_BINS_PER_OCTAVE = 16
_LOW, _HIGH = -24, 40
"""Exponents of two; the states of real models are well within this range."""
BINS = (_HIGH - _LOW) * _BINS_PER_OCTAVE + 2
"""The first bin counts smaller values, mainly zeros. The last counts larger or non-finite ones."""

_FIRST_TOKENS = 4
PLACES = 24
"""Tokens 0 to 3, where models put massive values, then one place per octave; the last covers the rest."""
_MEASURED_TOKENS, _MEASURED_ELEMENTS = 16, 2**16
"""About how many tokens, or elements if that is more, are measured of a longer row: its first tokens and
evenly spaced others.
"""


def bin_of(rms_T: NDArray[np.float32]) -> NDArray[np.int64]:
    """Return the bin of each root mean square."""
    with np.errstate(divide="ignore"):
        number_T = np.floor((np.log2(rms_T) - _LOW) * _BINS_PER_OCTAVE) + 1
    number_T = np.where(np.isnan(number_T), BINS - 1, number_T)
    clipped_T: NDArray[np.int64] = number_T.clip(0, BINS - 1).astype(np.int64)
    return clipped_T


def bin_edge(number: int) -> float:
    """Return the lower edge of bin `number`; the first bin has none, and the last no upper edge."""
    return float(2.0 ** (_LOW + (number - 1) / _BINS_PER_OCTAVE))


def place_of(token_T: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the place of each token number."""
    octave_T = np.frexp(token_T)[1].astype(np.int64) + 1
    place_T: NDArray[np.int64] = np.where(token_T < _FIRST_TOKENS, token_T, octave_T)
    return place_T.clip(max=PLACES - 1)


def place_begin(place: int) -> int:
    """Return the first token number of a place."""
    return int(place if place < _FIRST_TOKENS else 2 ** (place - 2))


def flag_tokens(low_T: torch.Tensor, high_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return which tokens are not finite, constant, and all zero; bool [T] each."""
    not_finite_T = ~(low_T.isfinite() & high_T.isfinite())
    constant_T = (low_T == high_T) & ~not_finite_T
    return not_finite_T, constant_T, constant_T & (low_T == 0)


@dataclass(slots=True)
class LayerTally:
    """The tally of one layer. `counts_PB` counts measured tokens by place in the row and RMS over H.

    The other numbers include every token.
    """

    counts_PB: NDArray[np.int64] = field(default_factory=lambda: np.zeros((PLACES, BINS), np.int64))
    zero: int = 0
    constant: int = 0
    not_finite: int = 0
    max_abs: float = 0.0

    def add(self, states_TH: torch.Tensor, low_T: torch.Tensor, high_T: torch.Tensor) -> None:
        """Count one row's states; `low_T` and `high_T` are each token's smallest and largest value."""
        tokens = _measured(*states_TH.shape)
        # In float16 the norm would overflow, and bfloat16 norms would cluster in a few bins.
        norm_T = torch.linalg.vector_norm(states_TH[tokens], dim=1, dtype=torch.float32).numpy()
        np.add.at(self.counts_PB, (place_of(tokens), bin_of(norm_T / math.sqrt(states_TH.shape[1]))), 1)
        not_finite_T, constant_T, zero_T = flag_tokens(low_T, high_T)
        self.zero += int(zero_T.sum())
        self.constant += int((constant_T & ~zero_T).sum())
        self.not_finite += int(not_finite_T.sum())
        largest_T = torch.maximum(-low_T, high_T).masked_fill(not_finite_T, 0)
        self.max_abs = max(self.max_abs, float(largest_T.max()))

    @property
    def tokens(self) -> int:
        """Tokens measured."""
        return int(self.counts_PB.sum())

    def rms(self, shares: Sequence[float], place: int | None = None) -> list[float]:
        """Return the quantiles of the root mean square for `shares` of the tokens, at one place or overall.

        0 stands for the first bin, infinity for the last; NaN if no token was measured.
        """
        counts_B = self.counts_PB.sum(axis=0) if place is None else self.counts_PB[place]
        below_B = counts_B.cumsum()
        return [_quantile(counts_B, below_B, share) for share in shares]

    def faults(self, layer_id: int) -> dict[str, int]:
        """Return the number of invalid tokens by fault; embeddings may be zero or constant."""
        wrong = {"not finite": self.not_finite}
        if layer_id != 0:
            wrong |= {"all zero": self.zero, "constant": self.constant}
        return {fault: tokens for fault, tokens in wrong.items() if tokens}


def _quantile(counts_B: NDArray[np.int64], below_B: NDArray[np.int64], share: float) -> float:
    if not below_B[-1]:
        return math.nan
    rank = share * below_B[-1]
    number = int(np.searchsorted(below_B, rank))
    if number in (0, BINS - 1):
        return 0.0 if number == 0 else math.inf
    low, high = bin_edge(number), bin_edge(number + 1)
    return float(high - (high - low) * (below_B[number] - rank) / counts_B[number])


def _measured(num_tokens: int, hidden_size: int) -> NDArray[np.int64]:
    """Return the tokens of a row to measure: the first ones, and evenly spaced others."""
    most = max(_MEASURED_TOKENS, _MEASURED_ELEMENTS // hidden_size)
    first = min(_FIRST_TOKENS, num_tokens)
    step = max(1, math.ceil((num_tokens - first) / (most - _FIRST_TOKENS)))
    return np.concatenate([np.arange(first), np.arange(first, num_tokens, step)])
