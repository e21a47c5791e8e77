"""Byte ranges of a file: what the shard reader reads through. A local file; `service.reader` adds the Hub's.

Only the ranges that are asked for are read, so that one layer of a dataset costs one layer's bytes.
"""

import mmap
import os
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from schemas.dataset.direct import (
    BLOCK_BYTES,
    blocks_bytes,
    check_range,
    open_direct,
    read_blocks,
    read_into,
)
from schemas.dataset.memory import Bytes


class RangeFile(Protocol):
    """An open file. `read` may be called from several threads at once, unless a class says otherwise."""

    @property
    def num_bytes(self) -> int:
        """The file's length."""

    def read(self, offset: int, num_bytes: int) -> Bytes:
        """Return `num_bytes` bytes from `offset` on, writable and the caller's own.

        Raises EOFError if the file ends before them, and OSError.
        """

    def arrow(self) -> Any:  # noqa: ANN401 - pyarrow is untyped
        """Return what `pyarrow.parquet.ParquetFile` opens."""


class LocalFile:
    """A file of this machine, read through the page cache, past it, or as a private map of it.

    The map is copy-on-write: what is written to it never reaches the file.
    """

    def __init__(self, path: Path, *, direct: bool = False, memory_map: bool = False) -> None:
        """Open the file. Raises OSError."""
        self.path, self._direct, self._memory_map = path, direct, memory_map
        self._fd = open_direct(path, os.O_RDONLY) if direct else os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.num_bytes = os.fstat(self._fd).st_size

    def __del__(self) -> None:
        self.close()

    def read(self, offset: int, num_bytes: int) -> Bytes:
        """Return `num_bytes` bytes from `offset` on, in memory that nobody else has."""
        end = offset + num_bytes
        check_range(offset, end, self.num_bytes)
        if not num_bytes:
            return np.empty(0, np.uint8)
        if self._memory_map:
            skipped = offset % mmap.ALLOCATIONGRANULARITY
            size = skipped + num_bytes
            view = mmap.mmap(self._fd, size, access=mmap.ACCESS_COPY, offset=offset - skipped)
            return np.frombuffer(view, np.uint8)[skipped:]
        if self._direct:
            # From the allocator, which keeps what was freed: fresh pages cost several times the read.
            memory = np.empty(blocks_bytes(offset, end) + BLOCK_BYTES, np.uint8)
            return read_blocks(self._fd, offset, end, memory[-memory.ctypes.data % BLOCK_BYTES :])
        memory = np.empty(num_bytes, np.uint8)
        read_into(self._fd, offset, memory, num_bytes)
        return memory

    def arrow(self) -> str:
        """Return the path."""
        return str(self.path)

    def close(self) -> None:
        """Close the file; safe to call twice."""
        fd, self._fd = getattr(self, "_fd", -1), -1
        if fd >= 0:
            os.close(fd)
