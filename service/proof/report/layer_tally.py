"""Counts the tokens of one layer while `quarry verify` reads it, without slowing it down.

Imports torch: import it lazily.

Legend: T tokens, H hidden size, P places in a row, B bins.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from service.proof.report.bins import BINS, PLACES, norm_bins, place_of, quantiles

_MEASURED_TOKENS, _MEASURED_ELEMENTS = 16, 2**16
"""Of a longer row about so many are measured, whichever is more: the first tokens, and some at even steps."""
_FIRST_TOKENS = 4
_WAITING_ROWS = 16
"""Steps on many rows at once take less time than many small steps; memory for so many is a few MB a layer."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A row to count: the places and bytes of its measured tokens, and the extremes of every token."""

    places: NDArray[np.int64]
    raw: NDArray[np.uint8]
    low_T: torch.Tensor
    high_T: torch.Tensor


@dataclass(slots=True)
class LayerTally:
    """One layer. `counts_PB` counts the measured tokens by their place in the row and their norm over H.

    What is told of them is the root mean square over H, which is `norm / sqrt(hidden_size)`. What cannot be
    right, and the largest magnitude, is known of every token.
    """

    hidden_size: int = 1
    counts_PB: NDArray[np.int64] = field(default_factory=lambda: np.zeros((PLACES, BINS), np.int64))
    zero: int = 0
    constant: int = 0
    not_finite: int = 0
    max_abs: float = 0.0
    _waiting: list[_Waiting] = field(default_factory=list)

    def add(self, states_TH: torch.Tensor, low_T: torch.Tensor, high_T: torch.Tensor) -> None:
        """Take one row's states; `low_T` and `high_T` are each token's smallest and largest value.

        They are counted some rows later, or by `settle`.
        """
        num_tokens, self.hidden_size = states_TH.shape
        picked, places = _picked(num_tokens, max(_MEASURED_TOKENS, _MEASURED_ELEMENTS // self.hidden_size))
        # numpy copies on this thread; torch would start a team of threads and wait for it.
        raw = states_TH.view(torch.uint8).numpy()[picked]
        self._waiting.append(_Waiting(places, raw, low_T, high_T))
        if len(self._waiting) == _WAITING_ROWS:
            self.settle()

    def settle(self) -> None:
        """Count what waits. The numbers are whole only afterwards."""
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, []
        lows, highs = ([row.low_T for row in waiting], [row.high_T for row in waiting])
        states_TH = torch.from_numpy(np.concatenate([row.raw for row in waiting])).view(lows[0].dtype)
        # A norm in bfloat16 is summed up in float32, and taken in a third of the time; float16 overflows.
        wide = None if states_TH.dtype == torch.bfloat16 else torch.float32
        bins = norm_bins(torch.linalg.vector_norm(states_TH, dim=1, dtype=wide))
        np.add.at(self.counts_PB, (np.concatenate([row.places for row in waiting]), bins), 1)
        low, high = torch.cat(lows).float().numpy(), torch.cat(highs).float().numpy()
        finite = np.isfinite(low) & np.isfinite(high)
        flat = (low == high) & finite
        zero = int((flat & (low == 0)).sum())
        self.zero += zero
        self.constant += int(flat.sum()) - zero
        self.not_finite += int((~finite).sum())
        if finite.any():
            self.max_abs = max(self.max_abs, -float(low[finite].min()), float(high[finite].max()))

    @property
    def tokens(self) -> int:
        """Tokens measured."""
        return int(self.counts_PB.sum())

    def rms(self, shares: Sequence[float], place: int | None = None) -> list[float]:
        """Return the root mean squares below which `shares` of the tokens lie, at one place or at all.

        0 where that is a zero token, infinity where it is out of all bounds, NaN where no token was measured.
        """
        counts_B = self.counts_PB.sum(axis=0) if place is None else self.counts_PB[place]
        return [norm / math.sqrt(self.hidden_size) for norm in quantiles(counts_B, shares)]

    def faults(self, layer_id: int) -> dict[str, int]:
        """Return how many tokens cannot be right, by what they are; embeddings may be zero or constant."""
        wrong = {"not finite": self.not_finite}
        if layer_id != 0:
            wrong |= {"all zero": self.zero, "constant": self.constant}
        return {what: tokens for what, tokens in wrong.items() if tokens}

    def merge(self, other: "LayerTally") -> None:
        """Take in what another has counted and settled."""
        self.hidden_size = other.hidden_size
        self.counts_PB += other.counts_PB
        self.zero += other.zero
        self.constant += other.constant
        self.not_finite += other.not_finite
        self.max_abs = max(self.max_abs, other.max_abs)


@lru_cache(maxsize=1)
def _picked(num_tokens: int, most: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the tokens to measure of a row, about `most`, and their places.

    The layers of a row follow each other, so that one answer is kept.
    """
    tokens = np.arange(num_tokens)
    if num_tokens > most:
        step = -(-(num_tokens - _FIRST_TOKENS) // (most - _FIRST_TOKENS))
        tokens = np.concatenate([tokens[:_FIRST_TOKENS], tokens[_FIRST_TOKENS::step]])
    return tokens, place_of(tokens)
