"""Makes tensors from a shard's layers. Imports torch: import it lazily.

Legend: T tokens, H hidden size.
"""

from dataclasses import dataclass

import torch

from schemas.dataset.codecs.fp8 import dequantize, half_steps, misfits
from schemas.dataset.memory import Bytes
from schemas.dataset.shard import Shard
from schemas.identity import Identity

LayerBytes = tuple[Bytes, ...]
"""The result of `Shard.layer_bytes` for a layer."""


@dataclass(frozen=True, slots=True)
class StoredState:
    """One token's state [H] in the shard's dtype, and how far each captured value may be from it.

    `half_H` is float32, half a step of each code; None if the bits are exactly those captured.
    """

    state_H: torch.Tensor
    half_H: torch.Tensor | None


def read_states(
    shard: Shard, row: int, layer_id: int, num_tokens: int | None = None, *, check: bool = False
) -> torch.Tensor:
    """Return the states [T, H] of one layer of one row, in the captured dtype.

    With `check` the layer's bytes are compared with their checksum. Raises DatasetError, OSError.
    """
    read = shard.checked_bytes if check else shard.layer_bytes
    return states_of(read(row, layer_id, num_tokens), shard.provenance.identity)


def is_lossy(identity: Identity) -> bool:
    """Return whether stored states only approximate the captured ones."""
    return identity.compression == "fp8"


def states_of(layer: LayerBytes, identity: Identity) -> torch.Tensor:
    """Return a layer's states [T, H] in the captured dtype; copies with fp8, or to align them."""
    dtype: torch.dtype = getattr(torch, identity.dtype)
    if is_lossy(identity):
        return dequantize(*_quantized(layer, identity), dtype)
    (raw,) = layer
    return torch.from_numpy(_aligned(raw, dtype)).view(dtype).view(-1, identity.hidden_size)


def last_state(layer: LayerBytes, identity: Identity) -> StoredState:
    """Return a copy of the last token's state."""
    if not is_lossy(identity):
        return StoredState(states_of(layer, identity)[-1].clone(), None)
    codes_TH, scales_T = _quantized(layer, identity)
    (state_H,) = dequantize(codes_TH[-1:], scales_T[-1:], getattr(torch, identity.dtype))
    return StoredState(state_H, half_steps(codes_TH[-1], float(scales_T[-1])))


def misfit_tokens(layer: LayerBytes, identity: Identity) -> torch.Tensor | None:
    """Return the tokens, bool [T], with codes and scale no quantizer can make; None if states are exact."""
    return misfits(*_quantized(layer, identity)) if is_lossy(identity) else None


def _quantized(layer: LayerBytes, identity: Identity) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes, uint8 [T, H], and the scales, float32 [T]."""
    codes, scales = layer
    codes_TH = torch.from_numpy(codes).view(-1, identity.hidden_size)
    return codes_TH, torch.from_numpy(_aligned(scales, torch.float32)).view(torch.float32)


def _aligned(raw: Bytes, dtype: torch.dtype) -> Bytes:
    """Return the bytes aligned for `dtype`: a copy if they are not aligned in the file."""
    return raw.copy() if raw.ctypes.data % dtype.itemsize else raw
