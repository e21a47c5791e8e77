"""Finds the cache-only layer's states in the engine's cache.

The layout is checked once at start; a mismatch is refused with an error that names it.

Legend: B blocks, L captured layers, S slots (tokens) per block, H hidden size.
"""

from dataclasses import dataclass
from typing import Any

import torch

from connector.versions import FIRST_BLSH, LayoutError, parse_version

CACHE_LAYER_MARK = "cache_only_layers."
"""Part of the name of vLLM's cache-only layer, by which it is found.

The type of its spec would not do: it differs between the scheduler and the worker.
"""

STORED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """The cache-only layer's place in the engine's KV cache configuration."""

    group_id: int
    layer_name: str
    block_size: int
    """S of this group; in hybrid models it differs from that of the target's attention."""


def find_cache_group(kv_cache_groups: list[Any]) -> CacheGroup:
    """Find the one cache-only layer by name among vLLM's KV cache groups. Raises LayoutError."""
    matching = [
        CacheGroup(group_id, name, _block_size(group.kv_cache_spec, name))
        for group_id, group in enumerate(kv_cache_groups)
        for name in group.layer_names
        if CACHE_LAYER_MARK in name
    ]
    if len(matching) != 1:
        names = [name for group in kv_cache_groups for name in group.layer_names]
        raise LayoutError(
            f"expected one cache-only layer, found {len(matching)} among {names}; "
            "start the engine with the method 'extract_hidden_states' and without pipeline parallelism"
        )
    return matching[0]


def _block_size(spec: Any, layer_name: str) -> int:  # vLLM's KVCacheSpec
    """Return the slots per block; a uniform group (as the worker sees it) holds one spec per layer."""
    per_layer = getattr(spec, "kv_cache_specs", None)
    return int((per_layer[layer_name] if per_layer else spec).block_size)


def view_BLSH(
    cache: torch.Tensor,
    group: CacheGroup,
    num_layers: int,
    hidden_size: int,
    dtype: torch.dtype,
    version: str,
) -> torch.Tensor:
    """Return the layer's cache as a `[B, L, S, H]` view, whatever the axis order and physical layout.

    No copy.

    Raises LayoutError if the shape, dtype or block size is not what the engine's configuration says.
    """
    ordered = parse_version(version) >= FIRST_BLSH
    expected = (num_layers, group.block_size) if ordered else (group.block_size, num_layers)
    if cache.dim() != 4 or tuple(cache.shape[1:]) != (*expected, hidden_size):
        detail = (
            f"the cache of {group.layer_name} has shape {tuple(cache.shape)}; vLLM {version} should give "
            f"(blocks, {expected[0]}, {expected[1]}, {hidden_size})"
        )
        # In a group with layers whose kernels need smaller blocks, all caches are in those.
        slots = cache.shape[2 if ordered else 1] if cache.dim() == 4 else 0
        if 0 < slots < group.block_size and group.block_size % slots == 0:
            detail += f"; start the engine with the 'block_size' {slots}, which its kernels take, or without"
        raise LayoutError(detail)
    if cache.dtype != dtype or dtype not in STORED_DTYPES:
        raise LayoutError(
            f"the cache of {group.layer_name} holds {cache.dtype}, the model computes in {dtype}; "
            "states are stored as bfloat16, float16 or float32, never quantized"
        )
    return cache if ordered else cache.permute(0, 2, 1, 3)
