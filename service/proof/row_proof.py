"""The checks that every row of states must pass by itself, made on the bytes of a sealed shard.

Imports torch: import it lazily.

Legend: T tokens, H hidden size.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import xxhash

from schemas.dataset.shard import Shard
from schemas.dataset.states import LayerBytes, StoredState, is_lossy, last_state, misfit_tokens, states_of
from service.proof.token_range import token_range

Watch = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Sees every layer that is read: its id, its states [T, H], each token's smallest and largest value [T]."""


@dataclass(frozen=True, slots=True)
class RowProof:
    """What reading a row again has shown. `last`: its last token's pre-norm state, if N is captured."""

    faults: tuple[str, ...]
    last: StoredState | None


def prove_row(shard: Shard, row: int, watch: Watch | None = None, *, values: bool = True) -> RowProof:
    """Read every layer of `row`: checksums agree, values are finite and vary, no two layers are equal.

    `watch` sees each layer too, so that nothing is read twice. Without `values` the bytes are only held
    against their checksums, at the speed of memory: enough where the same bytes were checked when they were
    captured.

    What was rounded to fp8 may have become equal in two layers, or constant, with nothing wrong in it; its
    codes and scales must be such as rounding makes.

    Raises DatasetError if the bytes cannot be read at all, OSError.
    """
    identity = shard.provenance.identity
    faults: list[str] = []
    seen: dict[int, int] = {}
    last: StoredState | None = None
    for layer_id, stored in zip(identity.layer_ids, shard.light[row].checksums, strict=True):
        layer = shard.layer_bytes(row, layer_id)
        checksum = _checksum(layer)
        if checksum != stored:
            faults.append(f"layer {layer_id}: its bytes have xxh3 {checksum:016x}, {stored:016x} is stored")
        if checksum in seen and not is_lossy(identity):
            faults.append(f"layers {seen[checksum]} and {layer_id} hold the same states")
        seen[checksum] = layer_id
        if values:
            states_TH = states_of(layer, identity)
            low_T, high_T = token_range(states_TH)
            found = _value_faults(low_T, high_T, layer_id, misfit_tokens(layer, identity))
            faults += [f"layer {layer_id}: {fault}" for fault in found]
            if watch is not None:
                watch(layer_id, states_TH, low_T, high_T)
        if layer_id == identity.num_layers:
            last = last_state(layer, identity)
    return RowProof(tuple(faults), last)


def _checksum(layer: LayerBytes) -> int:
    """Return the xxh3_64 of a layer's bytes."""
    xxh3 = xxhash.xxh3_64()
    for part in layer:
        xxh3.update(part.data)
    return int(xxh3.intdigest())


def _value_faults(
    low_T: torch.Tensor, high_T: torch.Tensor, layer_id: int, misfit_T: torch.Tensor | None
) -> list[str]:
    """Return what is wrong with the values; a padding token's embedding (layer 0) may be constant or zero.

    `misfit_T` names the tokens that rounding to fp8 does not make; it is null where nothing was rounded.
    """
    # Of NaN and of infinities a difference is not finite, and NaN is one of the two.
    broken_T = ~(high_T - low_T).isfinite()
    faults = [_tokens("not finite", broken_T)] if bool(broken_T.any()) else []
    constant_T = (low_T == high_T) & ~broken_T
    zero_T = constant_T & (low_T == 0)
    if misfit_T is not None:
        if bool(misfit_T.any()):
            faults.append(_tokens("no codes of its scale", misfit_T))
        constant_T = zero_T
    if layer_id != 0 and bool(constant_T.any()):
        faults.append(_tokens("all zero" if bool(zero_T.any()) else "constant", constant_T))
    return faults


def _tokens(what: str, flags_T: torch.Tensor) -> str:
    """Return `what in 3 of 17 tokens, the first at 14`."""
    count, first = int(flags_T.sum()), int(flags_T.int().argmax())
    return f"{what} in {count} of {len(flags_T)} tokens, the first at {first}"
