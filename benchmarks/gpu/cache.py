"""A paged cache on the device with the engine's shapes and strides, and requests that lie scattered in it.

Legend: B blocks, L captured layers, S slots a block, H hidden size, T tokens of a request.
"""

from dataclasses import dataclass

import numpy as np
import torch

NUM_LAYERS, HIDDEN_SIZE = 4, 4096
"""What three auxiliary layers and the last one of an 8B model come to: 32 KiB of states a token."""

NUM_SLOTS = 16
"""vLLM's usual block size on CUDA."""

TOKEN_BYTES = NUM_LAYERS * HIDDEN_SIZE * 2

LAYOUTS = ("slot first", "layer first")
"""How a block lies in memory: vLLM's LBNHC, where a token's layers are neighbours, and LBHNC."""

LENGTHS = {"short": (64, 193), "typical": (256, 769), "long": (8177, 8193)}
"""Tokens of a request, from and below: about 128, 512 and 8k."""


@dataclass(frozen=True, slots=True)
class Request:
    """Where a finished request lies: its blocks in token order, the last one maybe partly used."""

    block_ids: tuple[int, ...]
    num_tokens: int

    @property
    def num_bytes(self) -> int:
        """Bytes of its states."""
        return self.num_tokens * TOKEN_BYTES


def random_cache(cache_bytes: int, seed: int) -> torch.Tensor:
    """Return `cache_bytes` of normal bfloat16 on the device, flat and whole blocks."""
    num_blocks = cache_bytes // (NUM_SLOTS * TOKEN_BYTES)
    flat = torch.empty(num_blocks * NUM_SLOTS * TOKEN_BYTES // 2, dtype=torch.bfloat16, device="cuda")
    return flat.normal_(generator=torch.Generator("cuda").manual_seed(seed))


def view_BLSH(flat: torch.Tensor, layout: str) -> torch.Tensor:
    """Return `flat` as the connector sees the engine's cache in either layout; no copy."""
    if layout == "layer first":
        return flat.view(-1, NUM_LAYERS, NUM_SLOTS, HIDDEN_SIZE)
    return flat.view(-1, NUM_SLOTS, NUM_LAYERS, HIDDEN_SIZE).permute(0, 2, 1, 3)


def random_requests(lengths: str, num_bytes: int, num_blocks: int, seed: int) -> list[Request]:
    """Return requests of about `num_bytes` together, in blocks of their own from all over the cache.

    Raises ValueError if the cache is too small for them.
    """
    draw = np.random.default_rng(seed)
    free = draw.permutation(num_blocks).tolist()
    requests: list[Request] = []
    while num_bytes > 0:
        num_tokens = int(draw.integers(*LENGTHS[lengths]))
        blocks = [free.pop() for _ in range(-(-num_tokens // NUM_SLOTS)) if free]
        if len(blocks) * NUM_SLOTS < num_tokens:
            raise ValueError(f"{num_blocks} blocks are too few; a larger --cache-gib is needed")
        requests.append(Request(tuple(blocks), num_tokens))
        num_bytes -= requests[-1].num_bytes
    return requests


def states_LTH(cache_BLSH: torch.Tensor, request: Request) -> torch.Tensor:
    """Return the request's states on the host, one block after the other: what every copy must equal."""
    blocks = [cache_BLSH[block].cpu() for block in request.block_ids]
    return torch.cat(blocks, dim=1)[:, : request.num_tokens]
