"""The always-on checks of one row's states, while they are hot in the host pool.

They work on the bits, with numpy: without the sign bit, floats of any width are ordered like unsigned
integers, and infinity and NaN are the largest. So one masked maximum over H tells a zero token, one that is
not finite, and the magnitude. numpy stays on the writer's own thread; torch would start a team of threads
beside the model's.

Legend: T tokens, L captured layers, H hidden size.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from connector.marks import MARKS

RMS_TOKENS = 16
"""Tokens of a row, evenly spread, that the mean of the root mean square is taken over.

A statistic, not a check.
"""

SCRATCH_ELEMENTS = 65_536
"""Elements that are masked at a time: they stay in the core's own cache."""


class StatesWrongError(ValueError):
    """The states cannot be the model's: never stored, zero tokens, a constant layer, or two equal layers.

    The unit fails by this message.
    """


@dataclass(frozen=True, slots=True)
class LayerReading:
    """What is kept of one layer of one row.

    The mean over `RMS_TOKENS` of the root mean square over H, and the largest magnitude.
    """

    mean_rms: float
    max_abs: float


@dataclass(frozen=True, slots=True)
class NotFinite:
    """A row that holds NaN or infinity.

    The model overflowed on this sample, so the sample is rejected, not the unit.
    """

    layer_id: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class _Bits:
    """A float format as unsigned integers: the type, the mask without the sign, and the bits of infinity."""

    kind: type[np.unsignedinteger]
    magnitude: int
    infinity: int


_FORMATS = {
    torch.bfloat16: _Bits(np.uint16, 0x7FFF, 0x7F80),
    torch.float16: _Bits(np.uint16, 0x7FFF, 0x7C00),
    torch.float32: _Bits(np.uint32, 0x7FFF_FFFF, 0x7F80_0000),
}


class RowChecker:
    """Checks rows of one dtype; owns a small scratch buffer. Lives on one writer thread."""

    def __init__(self, dtype: torch.dtype) -> None:
        """Raises KeyError for a dtype that is never stored."""
        self._dtype = dtype
        self._bits = _FORMATS[dtype]
        self._scratch_TH: NDArray[np.unsignedinteger] = np.empty((0, 0), self._bits.kind)

    def check(
        self, states_LTH: torch.Tensor, layer_ids: Sequence[int]
    ) -> tuple[LayerReading, ...] | NotFinite:
        """Check one contiguous row; return a reading a layer, or where it is not finite.

        Raises StatesWrongError.

        Layer 0, the embeddings, may hold zero tokens (a padding token's) and may be constant.
        """
        readings = []
        for layer_id, layer_TH in zip(layer_ids, states_LTH, strict=True):
            bits_TH = layer_TH.view(torch.uint8).numpy().view(self._bits.kind)
            largest_T = self._magnitudes(bits_TH)
            if largest_T.max() >= MARKS[self._dtype]:
                self._refuse_marks(bits_TH, layer_id)
            not_finite = int((largest_T >= self._bits.infinity).sum())
            if not_finite:
                return NotFinite(layer_id, not_finite)
            if layer_id != 0:
                zero = int((largest_T == 0).sum())
                if zero:
                    raise StatesWrongError(
                        f"layer {layer_id} is all zero in {zero} of {len(largest_T)} tokens"
                    )
                constant = _constant(bits_TH)
                if constant:
                    raise StatesWrongError(
                        f"layer {layer_id} is constant in {constant} of {len(bits_TH)} tokens"
                    )
            readings.append(LayerReading(_mean_rms(layer_TH), self._float(int(largest_T.max()))))
        return tuple(readings)

    def _refuse_marks(self, bits_TH: NDArray[np.unsignedinteger], layer_id: int) -> None:
        marked = np.flatnonzero((bits_TH[:, [0, -1]] == MARKS[self._dtype]).all(axis=1))
        if marked.size:
            raise StatesWrongError(
                f"layer {layer_id}: the engine stored no state for {marked.size} of {len(bits_TH)} tokens, "
                f"the first at {marked[0]}"
            )

    def _magnitudes(self, bits_TH: NDArray[np.unsignedinteger]) -> NDArray[np.unsignedinteger]:
        """Return for each token the bits of its largest magnitude: [T]."""
        num_tokens, hidden_size = bits_TH.shape
        step = max(1, SCRATCH_ELEMENTS // hidden_size)
        if self._scratch_TH.shape != (step, hidden_size):
            self._scratch_TH = np.empty((step, hidden_size), self._bits.kind)
        mask = self._bits.kind(self._bits.magnitude)
        largest_T = np.empty(num_tokens, self._bits.kind)
        for begin in range(0, num_tokens, step):
            part_TH = bits_TH[begin : begin + step]
            masked_TH = np.bitwise_and(part_TH, mask, out=self._scratch_TH[: len(part_TH)])
            masked_TH.max(axis=1, out=largest_T[begin : begin + step])
        return largest_T

    def _float(self, bits: int) -> float:
        return float(torch.from_numpy(np.array([bits], self._bits.kind)).view(self._dtype)[0])


def _constant(bits_TH: NDArray[np.unsignedinteger]) -> int:
    """Count the tokens whose values are all the same; looks at two of each before it looks at all."""
    alike = bits_TH[bits_TH[:, 0] == bits_TH[:, -1]]
    return int((alike == alike[:, :1]).all(axis=1).sum())


def _mean_rms(layer_TH: torch.Tensor) -> float:
    step = max(1, len(layer_TH) // RMS_TOKENS)
    chosen = layer_TH[::step].float()
    return float(chosen.pow(2).mean(dim=1).sqrt().mean())


def check_distinct(checksums: Sequence[int], layer_ids: Sequence[int]) -> None:
    """Raise StatesWrongError if two layers of a row have the same bytes, told by their checksums."""
    seen: dict[int, int] = {}
    for layer_id, checksum in zip(layer_ids, checksums, strict=True):
        if checksum in seen:
            raise StatesWrongError(f"layers {seen[checksum]} and {layer_id} hold the same states")
        seen[checksum] = layer_id
