"""Reads byte ranges of local files, for the shard reader. The service adds files on the Hub and over HTTP.

Only the requested ranges are read, so that reading one layer of a dataset costs one layer's bytes.
"""

import hashlib
import io
import mmap
import os
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import xxhash

from schemas.dataset.direct import BLOCK_BYTES, open_direct, refuses_direct
from schemas.dataset.memory import Bytes, page_aligned

PIECE_BYTES = 4 * 2**20
"""How much is read at a time if a file is only hashed."""


class RangeFile(Protocol):
    """An open file. `read` may be called from several threads at once, unless a class says otherwise."""

    @property
    def num_bytes(self) -> int:
        """The file's length."""

    def read(self, offset: int, num_bytes: int) -> Bytes:
        """Return `num_bytes` bytes from `offset` on, as a writable copy.

        Raises EOFError if the file ends before them, and OSError.
        """

    def arrow(self) -> Any:  # noqa: ANN401 - pyarrow is untyped
        """Return a file object for `pyarrow.parquet.ParquetFile`."""


def arrow_file(file: RangeFile, buffer_bytes: int) -> Any:  # noqa: ANN401
    """Return a file object for `pyarrow` whose reads are those of `file`, at least `buffer_bytes` each.

    What `read` raises passes through pyarrow unchanged.
    """
    return pa.PythonFile(io.BufferedReader(_Seekable(file), buffer_bytes), mode="r")


class _Seekable(io.RawIOBase):
    """A file of ranges as a Python file object."""

    def __init__(self, file: RangeFile) -> None:
        self._file, self._position = file, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + (0, self._position, self._file.num_bytes)[whence]
        return self._position

    def readinto(self, memory: Any) -> int:  # noqa: ANN401 - a writable buffer
        count = max(0, min(len(memory), self._file.num_bytes - self._position))
        memory[:count] = self._file.read(self._position, count).data
        self._position += count
        return count


class LocalFile:
    """A local file, read through the page cache or past it."""

    def __init__(self, path: Path, *, direct: bool = False) -> None:
        """Open the file. Raises OSError."""
        self.path, self._direct = path, direct
        self._fd = open_direct(path, os.O_RDONLY) if direct else os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.num_bytes = os.fstat(self._fd).st_size

    def __del__(self) -> None:
        self.close()

    def read(self, offset: int, num_bytes: int) -> Bytes:
        """Return `num_bytes` bytes from `offset` on, in memory of their own."""
        end = offset + num_bytes
        if not 0 <= offset <= end <= self.num_bytes:
            raise EOFError(f"the file ends at byte {self.num_bytes}, the read at byte {end}")
        if not self._direct:
            memory = np.empty(num_bytes, np.uint8)
            self._read_into(offset, memory, num_bytes)
            return memory
        skipped = offset % BLOCK_BYTES
        block_bytes = -(-(skipped + num_bytes) // BLOCK_BYTES) * BLOCK_BYTES
        memory = self._page_memory(block_bytes)
        self._read_into(offset - skipped, memory, skipped + num_bytes)
        return memory[skipped : skipped + num_bytes]

    def arrow(self) -> Any:  # noqa: ANN401
        """Open the same file again, also if its path names another one now, or none. Raises OSError."""
        return pa.OSFile(f"/dev/fd/{self._fd}")

    @cached_property
    def mapping(self) -> Bytes:
        """The whole file, mapped copy-on-write: writes are private to this process, never on the disk."""
        return np.frombuffer(mmap.mmap(self._fd, 0, access=mmap.ACCESS_COPY), np.uint8)

    def close(self) -> None:
        """Close the file; safe to call twice."""
        fd, self._fd = getattr(self, "_fd", -1), -1
        if fd >= 0:
            os.close(fd)

    def _page_memory(self, num_bytes: int) -> Bytes:
        """Return page-aligned memory for a direct read."""
        # From the allocator, which reuses freed memory: fresh pages cost several times the read.
        memory = np.empty(num_bytes + BLOCK_BYTES, np.uint8)
        return memory[-memory.ctypes.data % BLOCK_BYTES :][:num_bytes]

    def _read_into(self, offset: int, memory: Bytes, num_bytes: int) -> None:
        """Fill `memory` from `offset` on, at least `num_bytes` of it. Raises OSError, EOFError."""
        filled = 0
        while filled < num_bytes:
            try:
                count = os.preadv(self._fd, [memory[filled:].data], offset + filled)
            except OSError as error:
                if not refuses_direct(self._fd, error):
                    raise
                continue
            if not count:
                raise EOFError(
                    f"the file ends at byte {offset + filled}, the read at byte {offset + num_bytes}"
                )
            # A short read ends at the end of the file or on a block boundary.
            filled += count


class DirectReader(LocalFile):
    """Reads a file sequentially past the page cache, and hashes what it reads.

    Returned data is in a buffer that the next call overwrites.
    """

    def __init__(self, path: Path) -> None:
        """Open the file. Raises OSError."""
        super().__init__(path, direct=True)
        self.position = 0
        self._xxh3, self._sha256 = xxhash.xxh3_128(), hashlib.sha256()
        self._buffer = page_aligned(2 * PIECE_BYTES)

    def read(self, offset: int, num_bytes: int) -> Bytes:
        """Return a range; bytes skipped before it are read and hashed, too.

        A range before `position` is not hashed again.
        """
        if offset < self.position:
            return super().read(offset, num_bytes)
        begin = self.position
        return self.upto(offset + num_bytes)[offset - begin :]

    def upto(self, end: int) -> Bytes:
        """Return the bytes from `position` to `end`, and set `position` to `end`."""
        data = super().read(self.position, end - self.position)
        self._xxh3.update(data.data)
        self._sha256.update(data.data)
        self.position = end
        return data

    def tail(self, num_bytes: int) -> Bytes:
        """Return up to `num_bytes` from the end of the file, without hashing or advancing."""
        begin = max(0, self.num_bytes - num_bytes)
        return super().read(begin, self.num_bytes - begin)

    def tail_xxh3(self, num_bytes: int) -> str:
        """Return the hex xxh3_128 of the file's last `num_bytes`, or of all of it, reading in pieces."""
        xxh3 = xxhash.xxh3_128()
        for offset in range(max(0, self.num_bytes - num_bytes), self.num_bytes, PIECE_BYTES):
            xxh3.update(super().read(offset, min(PIECE_BYTES, self.num_bytes - offset)).data)
        return xxh3.hexdigest()

    def rest(self) -> tuple[str, str]:
        """Read to the end and return the hex xxh3_128 and sha256 of the whole file."""
        while self.position < self.num_bytes:
            self.upto(min(self.position + PIECE_BYTES, self.num_bytes))
        return self._xxh3.hexdigest(), self._sha256.hexdigest()

    def _page_memory(self, num_bytes: int) -> Bytes:
        if num_bytes > self._buffer.size:
            self._buffer = page_aligned(num_bytes)
        return self._buffer[:num_bytes]
