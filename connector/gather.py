"""Copies a request's states from paged blocks into a host slab, layer by layer contiguous.

The only copy on the host side.

Legend: B blocks, L captured layers, S slots a block, H hidden size, T tokens of the request.
"""

from collections.abc import Sequence
from typing import Protocol

import torch

STAGE_BYTES = 64 * 2**20
"""Device memory that the CUDA gather stages through, whatever the length of a request."""


class Copy(Protocol):
    """A copy under way."""

    def done(self) -> bool:
        """Say whether the slab holds all its bytes; never blocks."""


class _Finished:
    def done(self) -> bool:
        return True


class CpuGather:
    """Copies on the calling thread. One strided copy a block: 6x faster than indexing by token."""

    def __init__(self, cache_BLSH: torch.Tensor) -> None:
        """Read from `cache_BLSH`, a view of the engine's own memory."""
        self._cache = cache_BLSH
        self._slots = cache_BLSH.shape[2]

    def start(self, block_ids: Sequence[int], out_LTH: torch.Tensor) -> Copy:
        """Fill `out_LTH` from `block_ids`, in token order."""
        num_tokens = out_LTH.shape[1]
        for index, block in enumerate(block_ids):
            begin = index * self._slots
            count = min(self._slots, num_tokens - begin)
            out_LTH[:, begin : begin + count].copy_(self._cache[block, :, :count])
        return _Finished()


class CudaGather:
    """Copies on a stream of its own.

    Gather into a fixed device buffer, then to pinned memory, chunk by chunk.

    The main stream is never waited for on the host. One chunk is gathered after the other on the same
    stream, so that the staging buffer is free again when the next gather begins.
    """

    def __init__(self, cache_BLSH: torch.Tensor, stage_bytes: int = STAGE_BYTES) -> None:
        """Allocate the staging buffer on the cache's device."""
        self._cache = cache_BLSH
        _, _, self._slots, hidden_size = cache_BLSH.shape
        block_bytes = self._slots * hidden_size * cache_BLSH.element_size()
        self._chunk_blocks = max(1, stage_bytes // block_bytes)
        self._stage = torch.empty(
            (self._chunk_blocks, self._slots, hidden_size), dtype=cache_BLSH.dtype, device=cache_BLSH.device
        )
        self._stream = torch.cuda.Stream(cache_BLSH.device)  # type: ignore[no-untyped-call]

    def start(self, block_ids: Sequence[int], out_LTH: torch.Tensor) -> Copy:
        """Enqueue the copy of `block_ids` into the pinned `out_LTH`, behind what the current stream holds."""
        num_layers, num_tokens, hidden_size = out_LTH.shape
        index = torch.tensor(block_ids, dtype=torch.int64).pin_memory()
        self._stream.wait_stream(torch.cuda.current_stream(self._cache.device))
        with torch.cuda.stream(self._stream):
            index = index.to(self._cache.device, non_blocking=True)
            for layer in range(num_layers):
                for first in range(0, len(block_ids), self._chunk_blocks):
                    blocks = index[first : first + self._chunk_blocks]
                    stage = self._stage[: len(blocks)]
                    torch.index_select(self._cache[:, layer], 0, blocks, out=stage)
                    begin = first * self._slots
                    count = min(len(blocks) * self._slots, num_tokens - begin)
                    out_LTH[layer, begin : begin + count].copy_(
                        stage.view(-1, hidden_size)[:count], non_blocking=True
                    )
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        return _CudaCopy(event, index)


class _CudaCopy:
    """Holds the block index until the stream has read it."""

    def __init__(self, event: torch.cuda.Event, index: torch.Tensor) -> None:
        self._event = event
        self._index = index

    def done(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]


def gather_for(cache_BLSH: torch.Tensor) -> CpuGather | CudaGather:
    """Return the gather for the device that the cache lies on."""
    return CudaGather(cache_BLSH) if cache_BLSH.is_cuda else CpuGather(cache_BLSH)
