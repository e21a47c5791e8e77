"""Memory for states, used again: what no tensor holds any more is lent to the next row.

Fresh memory costs more than a read from the page cache. The kernel zeroes it and maps it page by page: 0.26
CPU seconds a GB in pages of 4 KiB, 0.09 in huge ones, where filling memory that is there takes 0.04. A block
begins on a page, so that a file can be read to it past the page cache.
"""

import mmap
import weakref
from contextlib import suppress

import torch

IDLE_BYTES = 2**29
"""Kept for the next rows at most by one process; rows in somebody's hands do not count."""

BLOCK_BYTES = 2**21
"""A block's size is a multiple of a huge page. Less than one is left to the allocator, which keeps it too."""

_HUGEPAGE: int | None = getattr(mmap, "MADV_HUGEPAGE", None)


class Pool:
    """Lends tensors of bytes; a block comes back when the last tensor over it is gone, in whatever thread.

    Safe to use from several threads. Nothing is locked, since that may be the end of a tensor in the middle
    of any line here: each step is one operation of a list, and a block that another thread took is passed by.
    A process that is forked has copies of its own.
    """

    def __init__(self, idle_bytes: int = IDLE_BYTES) -> None:
        """Keep `idle_bytes` that nobody holds at most."""
        self._idle_bytes = idle_bytes
        self._idle: list[mmap.mmap] = []

    @property
    def idle_bytes(self) -> int:
        """What is kept for the next rows."""
        return sum(map(len, list(self._idle)))

    def lend(self, num_bytes: int) -> torch.Tensor:
        """Return memory of any content, uint8 [num_bytes]: the caller's until no tensor shares it.

        Raises OSError if there is none left.
        """
        if num_bytes < BLOCK_BYTES:
            return torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
        due = -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES
        block = self._idle_block(due) or _fresh(due)
        held = memoryview(block)
        tensor = torch.frombuffer(held, dtype=torch.uint8, count=num_bytes)
        weakref.finalize(held, self._take_back, block).atexit = False
        return tensor

    def _idle_block(self, due: int) -> mmap.mmap | None:
        """Take the smallest idle block of `due` bytes or half as much again, if there is one."""
        fitting = [block for block in list(self._idle) if due <= len(block) <= due + due // 2]
        for block in sorted(fitting, key=len):
            with suppress(ValueError):
                self._idle.remove(block)
                return block
        return None

    def _take_back(self, block: mmap.mmap) -> None:
        self._idle.append(block)
        with suppress(IndexError):
            while self.idle_bytes > self._idle_bytes:
                self._idle.pop(0)


POOL = Pool()
"""The process's own."""


def _fresh(num_bytes: int) -> mmap.mmap:
    """Map memory that is nobody else's, not even a forked process's."""
    block = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if _HUGEPAGE is not None:
        # A kernel that was built without huge pages says so.
        with suppress(OSError):
            block.madvise(_HUGEPAGE)
    return block
