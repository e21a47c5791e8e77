"""The always-on checks of one row's states, while they are hot in the host pool.

Legend: T tokens, L captured layers, H hidden size.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch


class StatesWrongError(ValueError):
    """The states cannot be the model's: zero rows, a constant layer, or two equal layers. The unit fails by this message."""


@dataclass(frozen=True, slots=True)
class LayerReading:
    """One layer of one row: the sum over tokens of the root mean square over H, and the largest magnitude."""

    sum_rms: float
    max_abs: float


@dataclass(frozen=True, slots=True)
class NotFinite:
    """A row that holds NaN or infinity: the model overflowed on this sample, so the sample is rejected, not the unit."""

    layer_id: int
    num_tokens: int


def check_row(states_LTH: torch.Tensor, layer_ids: Sequence[int]) -> tuple[LayerReading, ...] | NotFinite:  # noqa: N803
    """Check one row; return a reading a layer, or where it is not finite. Raises StatesWrongError.

    Layer 0, the embeddings, may hold zero rows (a padding token's embedding) and may be constant for a row of one token id.
    """
    readings = []
    hidden_size = states_LTH.shape[2]
    for layer_id, layer_TH in zip(layer_ids, states_LTH, strict=True):  # noqa: N806 - axes
        rms_T = torch.linalg.vector_norm(layer_TH, dim=1, dtype=torch.float32) / hidden_size**0.5  # noqa: N806
        low, high = (float(edge) for edge in torch.aminmax(layer_TH))
        max_abs = max(abs(low), abs(high))
        if not (max_abs < float("inf")):
            # aminmax carries NaN through, so the negated comparison is true for NaN and for infinity alike.
            bad = int((~torch.isfinite(layer_TH).all(dim=1)).sum())
            return NotFinite(layer_id, bad)
        if layer_id != 0:
            zero = int((rms_T == 0).sum())
            if zero:
                raise StatesWrongError(f"layer {layer_id} is all zero in {zero} of {len(rms_T)} tokens")
            if low == high:
                raise StatesWrongError(f"layer {layer_id} is constant ({low})")
        readings.append(LayerReading(float(rms_T.sum()), max_abs))
    return tuple(readings)


def check_distinct(checksums: Sequence[int], layer_ids: Sequence[int]) -> None:
    """Raise StatesWrongError if two layers of a row have the same bytes, told by their checksums."""
    seen: dict[int, int] = {}
    for layer_id, checksum in zip(layer_ids, checksums, strict=True):
        if checksum in seen:
            raise StatesWrongError(f"layers {seen[checksum]} and {layer_id} hold the same states")
        seen[checksum] = layer_id
