"""The always-on checks of one row's states, run while the row is still in the host pool.

They work on the bits, with numpy: without the sign bit, floats of any width are ordered like unsigned
integers, and infinity and NaN are the largest. So one masked maximum over H finds zero tokens, tokens that
are not finite, and the magnitude. numpy stays on the writer's own thread; torch would start a thread pool
that competes with the model's.

Legend: T tokens, L captured layers, H hidden size.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from connector.sentinels import SENTINELS
from connector.sums import Sums, add_up, words_of
from schemas.dataset.entries import LayerStats
from schemas.dataset.memory import scratch

RMS_TOKENS = 16
"""About how many evenly spaced tokens of a row `LayerStats.mean_rms` averages over: a statistic, not a check.
"""

_LEAST_SQUARES = 1e-30
"""Below this, float32 may have underflowed squares that matter."""

SCRATCH_ELEMENTS = 1_048_576
"""Elements read at a time: few enough to stay in the cores' caches from the sum to the maximum, and so many
that the threads of a process seldom meet at its interpreter lock, which they take after every call of numpy.
"""


class StatesWrongError(ValueError):
    """The states cannot be the model's: never stored, zero tokens, a constant layer, or two equal layers.

    The unit fails with this message.
    """


class NotFiniteError(ValueError):
    """A row holds NaN or infinity: the model overflowed on this sample, or the device has failed.

    The row is rejected with this message; the unit does not fail. The service decides whose fault it is.
    """


@dataclass(frozen=True, slots=True)
class Look:
    """The result of one pass over a row.

    The sum of every state, the bits of its largest magnitude, and each layer's xxh3_64.
    """

    sums_LT: Sums
    largest_LT: NDArray[np.unsignedinteger]
    checksums: tuple[int, ...]


_BITS: dict[torch.dtype, type[np.unsignedinteger]] = {
    torch.bfloat16: np.uint16,
    torch.float16: np.uint16,
    torch.float32: np.uint32,
}
_INFINITIES = {torch.bfloat16: 0x7F80, torch.float16: 0x7C00, torch.float32: 0x7F80_0000}


class RowChecker:
    """Checks rows of one dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        """Take the dtype. Raises KeyError for a dtype that is never stored."""
        self._dtype = dtype
        self._bits = _BITS[dtype]

    def look(self, states_LTH: torch.Tensor) -> Look:
        """Read one contiguous row once and compute everything that needs all of its values."""
        bits_LTH, words_LTW = self._bits_of(states_LTH), words_of(states_LTH)
        num_layers, num_tokens, hidden_size = bits_LTH.shape
        step = max(1, SCRATCH_ELEMENTS // hidden_size)
        masked = scratch("masked", step * hidden_size * bits_LTH.itemsize)
        masked_TH = masked.view(self._bits).reshape(step, hidden_size)
        mask = self._bits(np.iinfo(self._bits).max >> 1)
        sums_LT = np.empty((num_layers, num_tokens), np.int64)
        largest_LT = np.empty((num_layers, num_tokens), self._bits)
        hashes = [xxhash.xxh3_64() for _ in range(num_layers)]
        for layer in range(num_layers):
            for begin in range(0, num_tokens, step):
                some = slice(begin, min(begin + step, num_tokens))
                add_up(words_LTW[layer, some], sums_LT[layer, some])
                part_TH = bits_LTH[layer, some]
                np.bitwise_and(part_TH, mask, out=masked_TH[: len(part_TH)])
                masked_TH[: len(part_TH)].max(axis=1, out=largest_LT[layer, some])
                hashes[layer].update(part_TH.data)
        return Look(sums_LT, largest_LT, tuple(layer.intdigest() for layer in hashes))

    def check(self, states_LTH: torch.Tensor, layer_ids: Sequence[int], look: Look) -> tuple[LayerStats, ...]:
        """Check one contiguous row from its `look`; return the statistics of each layer.

        Raises StatesWrongError and NotFiniteError. Layer 0, the embeddings, may hold zero tokens (a padding
        token's) and may be constant.
        """
        readings = []
        for layer_id, bits_TH, largest_T in zip(
            layer_ids, self._bits_of(states_LTH), look.largest_LT, strict=True
        ):
            if largest_T.max() >= SENTINELS[self._dtype]:
                self._refuse_sentinels(bits_TH, layer_id)
            not_finite = int((largest_T >= _INFINITIES[self._dtype]).sum())
            if not_finite:
                raise NotFiniteError(
                    f"layer {layer_id} is not finite in {not_finite} of {len(largest_T)} tokens"
                )
            if layer_id != 0:
                zero, constant = int((largest_T == 0).sum()), _constant(bits_TH)
                if zero or constant:
                    what = f"all zero in {zero}" if zero else f"constant in {constant}"
                    raise StatesWrongError(f"layer {layer_id} is {what} of {len(largest_T)} tokens")
            max_abs = float(as_float32(largest_T.max(keepdims=True), self._dtype)[0])
            mean_rms = _mean_rms(bits_TH, self._dtype)
            readings.append(LayerStats(layer_id=layer_id, mean_rms=mean_rms, max_abs=max_abs))
        return tuple(readings)

    def _refuse_sentinels(self, bits_TH: NDArray[np.unsignedinteger], layer_id: int) -> None:
        marked = np.flatnonzero((bits_TH[:, [0, -1]] == SENTINELS[self._dtype]).all(axis=1))
        if marked.size:
            raise StatesWrongError(
                f"layer {layer_id}: the engine stored no state for {marked.size} of {len(bits_TH)} tokens, "
                f"the first at {marked[0]}"
            )

    def _bits_of(self, states_LTH: torch.Tensor) -> NDArray[np.unsignedinteger]:
        return states_LTH.view(torch.uint8).numpy().view(self._bits)


def _constant(bits_TH: NDArray[np.unsignedinteger]) -> int:
    """Count the tokens whose values are all the same; compare two values of each before comparing all."""
    alike = bits_TH[bits_TH[:, 0] == bits_TH[:, -1]]
    return int((alike == alike[:, :1]).all(axis=1).sum())


def _mean_rms(bits_TH: NDArray[np.unsignedinteger], dtype: torch.dtype) -> float:
    """Return the mean over some tokens of the root mean square over H.

    Squares are summed in float32, or in float64 if a sum is too large or too small for that.
    """
    chosen_TH = as_float32(bits_TH[:: max(1, len(bits_TH) // RMS_TOKENS)], dtype)
    squares_T = np.einsum("th,th->t", chosen_TH, chosen_TH)
    if not np.all((squares_T > _LEAST_SQUARES) & (squares_T < np.inf)):
        squares_T = np.square(chosen_TH, dtype=np.float64).sum(axis=1)
    return float(np.sqrt(squares_T / bits_TH.shape[1], dtype=np.float64).mean())


def as_float32(bits: NDArray[np.unsignedinteger], dtype: torch.dtype) -> NDArray[np.float32]:
    """Return the values that the bits of `dtype` encode."""
    if dtype == torch.bfloat16:
        return (bits.astype(np.uint32) << 16).view(np.float32)
    return bits.view(np.float16 if dtype == torch.float16 else np.float32).astype(np.float32, copy=False)


def check_distinct(checksums: Sequence[int], layer_ids: Sequence[int]) -> None:
    """Raise StatesWrongError if two layers of a row have the same checksum, and so the same bytes."""
    layer_of: dict[int, int] = {}
    for layer_id, checksum in zip(layer_ids, checksums, strict=True):
        if checksum in layer_of:
            raise StatesWrongError(f"layers {layer_of[checksum]} and {layer_id} hold the same states")
        layer_of[checksum] = layer_id
