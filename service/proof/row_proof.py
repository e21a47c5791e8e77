"""The checks that every row of states must pass by itself, made on the bytes of a sealed shard.

Imports torch: import it lazily.

Legend: T tokens, H hidden size.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import xxhash

from service.proof.shard_reader import ShardReader

Watch = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Sees every layer that is read: its id, its states [T, H], each token's smallest and largest value [T]."""


@dataclass(frozen=True, slots=True)
class RowProof:
    """What reading a row again has shown. `last_H`: its last token's pre-norm state, if N is captured."""

    faults: tuple[str, ...]
    last_H: torch.Tensor | None


def prove_row(reader: ShardReader, row: int, watch: Watch | None = None, *, values: bool = True) -> RowProof:
    """Read every layer of `row`: checksums agree, values are finite and vary, no two layers are equal.

    `watch` sees each layer too, so that nothing is read twice. Without `values` the bytes are only held
    against their checksums, at the speed of memory: enough where the same bytes were checked when they were
    captured.

    Raises DatasetBroken if the bytes cannot be read at all.
    """
    identity = reader.provenance.identity
    faults: list[str] = []
    seen: dict[int, int] = {}
    last_H: torch.Tensor | None = None
    for layer_id, stored in zip(identity.layer_ids, reader.light[row].checksums, strict=True):
        raw = reader.layer_bytes(row, layer_id)
        checksum = xxhash.xxh3_64_intdigest(raw.data)
        if checksum != stored:
            faults.append(f"layer {layer_id}: its bytes have xxh3 {checksum:016x}, {stored:016x} is stored")
        if checksum in seen:
            faults.append(f"layers {seen[checksum]} and {layer_id} hold the same states")
        seen[checksum] = layer_id
        states_TH = reader.states(raw)
        if values:
            low_T, high_T = torch.aminmax(states_TH, dim=1)
            faults += [f"layer {layer_id}: {fault}" for fault in _value_faults(low_T, high_T, layer_id)]
            if watch is not None:
                watch(layer_id, states_TH, low_T, high_T)
        if layer_id == identity.num_layers:
            last_H = states_TH[-1].clone()
    return RowProof(tuple(faults), last_H)


def _value_faults(low_T: torch.Tensor, high_T: torch.Tensor, layer_id: int) -> list[str]:
    """Return what is wrong with the values; a padding token's embedding (layer 0) may be constant or zero."""
    # Of NaN and of infinities a difference is not finite, and aminmax carries NaN through.
    broken_T = ~(high_T - low_T).isfinite()
    faults = [_tokens("not finite", broken_T)] if bool(broken_T.any()) else []
    constant_T = (low_T == high_T) & ~broken_T
    if layer_id != 0 and bool(constant_T.any()):
        zero_T = constant_T & (low_T == 0)
        faults.append(_tokens("all zero" if bool(zero_T.any()) else "constant", constant_T))
    return faults


def _tokens(what: str, flags_T: torch.Tensor) -> str:
    """Return `what in 3 of 17 tokens, the first at 14`."""
    count, first = int(flags_T.sum()), int(flags_T.int().argmax())
    return f"{what} in {count} of {len(flags_T)} tokens, the first at {first}"
