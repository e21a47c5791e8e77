"""Counts the tokens of one layer while `quarry verify` reads it, without slowing it down.

Imports torch: import it lazily.

Legend: T tokens, H hidden size, P places in a row, B bins.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from service.proof.report.bins import BINS, PLACES, norm_bins, place_of, quantiles

_MEASURED_TOKENS, _MEASURED_ELEMENTS = 16, 2**16
"""Of a longer row about so many are measured, whichever is more: the first tokens, and some at even steps."""
_FIRST_TOKENS = 4
_BUFFER_BYTES = 2**20


class _Waiting:
    """Rows whose measured tokens were copied and are not counted yet.

    Steps on many rows at once take less time than many small steps, and a buffer that is kept less than new
    ones.
    """

    def __init__(self, size: int, token_bytes: int) -> None:
        self.raw: NDArray[np.uint8] = np.empty((size, token_bytes), np.uint8)
        self.filled = 0
        self.tokens: list[tuple[range, range]] = []
        self.lows: list[torch.Tensor] = []
        self.highs: list[torch.Tensor] = []

    def take(self, raw: NDArray[np.uint8], tokens: tuple[range, range]) -> None:
        """Copy some tokens of a row; there must be room for them."""
        # numpy copies on this thread; torch would start a team of threads and wait for it.
        for part in tokens:
            end = self.filled + len(part)
            self.raw[self.filled : end] = raw[part.start : part.stop : part.step]
            self.filled = end
        self.tokens.append(tokens)

    def clear(self) -> None:
        """Forget the rows and keep the buffer."""
        self.filled = 0
        for waiting in (self.tokens, self.lows, self.highs):
            waiting.clear()


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
    _waiting: _Waiting | None = None

    def add(self, states_TH: torch.Tensor, low_T: torch.Tensor, high_T: torch.Tensor) -> None:
        """Take one row's states; `low_T` and `high_T` are each token's smallest and largest value.

        They are counted some rows later, or by `settle`.
        """
        num_tokens, self.hidden_size = states_TH.shape
        most = max(_MEASURED_TOKENS, _MEASURED_ELEMENTS // self.hidden_size)
        raw = states_TH.view(torch.uint8).numpy()
        if self._waiting is None:
            self._waiting = _Waiting(max(most, _BUFFER_BYTES // raw.shape[1]), raw.shape[1])
        tokens = _measured(num_tokens, most)
        if self._waiting.filled + sum(map(len, tokens)) > len(self._waiting.raw):
            self.settle()
        self._waiting.take(raw, tokens)
        self._waiting.lows.append(low_T)
        self._waiting.highs.append(high_T)

    def settle(self) -> None:
        """Count what waits. The numbers are whole only afterwards."""
        waiting = self._waiting
        if waiting is None or not waiting.filled:
            return
        low_T, high_T = torch.cat(waiting.lows), torch.cat(waiting.highs)
        states_TH = torch.from_numpy(waiting.raw[: waiting.filled]).view(low_T.dtype)
        # A norm in bfloat16 is summed up in float32, and taken in a third of the time; float16 overflows.
        wide = None if states_TH.dtype == torch.bfloat16 else torch.float32
        bins = norm_bins(torch.linalg.vector_norm(states_TH, dim=1, dtype=wide))
        tokens = np.concatenate(
            [np.arange(*(p.start, p.stop, p.step)) for row in waiting.tokens for p in row]
        )
        np.add.at(self.counts_PB, (place_of(tokens), bins), 1)
        low, high = low_T.float().numpy(), high_T.float().numpy()
        finite = np.isfinite(low) & np.isfinite(high)
        flat = (low == high) & finite
        zero = int((flat & (low == 0)).sum())
        self.zero += zero
        self.constant += int(flat.sum()) - zero
        self.not_finite += int((~finite).sum())
        if finite.any():
            self.max_abs = max(self.max_abs, -float(low[finite].min()), float(high[finite].max()))
        waiting.clear()

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


def _measured(num_tokens: int, most: int) -> tuple[range, range]:
    """Return the tokens to measure of a row, at most `most`: the first ones, and others at even steps."""
    first = min(_FIRST_TOKENS, num_tokens)
    step = max(1, -(-(num_tokens - first) // (most - _FIRST_TOKENS)))
    return range(first), range(first, num_tokens, step)
