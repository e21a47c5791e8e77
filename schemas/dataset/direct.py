"""Files past the page cache: whole blocks go by O_DIRECT between the disk and memory that begins on a page.

The kernel copies nothing, keeps nothing, and has nothing left to flush when the file is sealed: on 2 cores a
GB costs a tenth of the CPU that `write()` takes for it. A file system without O_DIRECT is written to and read
from through the page cache.
"""

import errno
import fcntl
import os
from pathlib import Path
from typing import Self

import numpy as np
import xxhash

from schemas.dataset.memory import Bytes, page_aligned

BLOCK_BYTES = 4096
"""Offsets and lengths are multiples of it: the largest logical block of disks."""

MEMORY_ALIGN_BYTES = 512
"""Addresses are multiples of it: the most that Linux asks for where a logical block has 512 bytes."""

STAGE_BYTES = 2**20
"""Memory that gathers short and unaligned pieces."""

READ_BYTES = 8 * 2**20
"""Read at once, unless a longer piece is asked for."""

MAX_CALL_BYTES = 2**30
"""The most that is handed to the kernel in one call; its own limit is just below 2 GiB."""


class DirectWriter:
    """Writes a new file front to back, and hashes what it writes.

    All raise OSError. `position` is where the next byte goes.
    """

    def __init__(self, path: Path) -> None:
        """Create or empty the file."""
        self._fd = open_direct(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        self._stage = page_aligned(STAGE_BYTES)
        self._staged = 0
        self._xxh3 = xxhash.xxh3_128()
        self.position = 0

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes; what lies aligned in memory and meets a block's border goes out as it lies."""
        if not len(data):
            return
        self._xxh3.update(data)
        rest = np.frombuffer(data, np.uint8)
        self.position += rest.size
        while rest.size:
            whole = rest.size // BLOCK_BYTES * BLOCK_BYTES
            if self._staged % BLOCK_BYTES == 0 and whole and rest.ctypes.data % MEMORY_ALIGN_BYTES == 0:
                self._flush()
                self._out(rest[:whole])
                rest = rest[whole:]
                continue
            taken = rest[: STAGE_BYTES - self._staged]
            self._stage[self._staged : self._staged + taken.size] = taken
            self._staged += taken.size
            rest = rest[taken.size :]
            if self._staged == STAGE_BYTES:
                self._flush()

    def pad(self, num_bytes: int) -> None:
        """Append zeros until `num_bytes` more would end on a block's border."""
        self.write(bytes(-(self.position + num_bytes) % BLOCK_BYTES))

    def end(self) -> str:
        """Write what is left and close the file; return its hex xxh3_128. Not durable before it is sealed."""
        left = self._staged
        self._stage[left : left + -left % BLOCK_BYTES] = 0
        self._staged += -left % BLOCK_BYTES
        self._flush()
        os.ftruncate(self._fd, self.position)
        self.close()
        return self._xxh3.hexdigest()

    def close(self) -> None:
        """Close the file as it is; safe to call twice."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)

    def _flush(self) -> None:
        if self._staged:
            self._out(self._stage[: self._staged])
            self._staged = 0

    def _out(self, blocks: Bytes) -> None:
        left = blocks.data
        while left:
            part = left[:MAX_CALL_BYTES]
            try:
                count = os.write(self._fd, part)
            except OSError as error:
                if not _refuses_direct(self._fd, error):
                    raise
                continue
            left = left[count:]


class DirectReader:
    """Reads a file front to back, and hashes what it reads. A context manager; all raise OSError.

    What it returns lies in one buffer of its own, and holds until the next call.
    """

    def __init__(self, path: Path) -> None:
        """Open the file."""
        self.path = path
        self._fd = open_direct(path, os.O_RDONLY)
        self.num_bytes = os.fstat(self._fd).st_size
        self.position = 0
        self._xxh3 = xxhash.xxh3_128()
        self._buffer = page_aligned(READ_BYTES)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; safe to call twice."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)

    def arrow(self) -> str:
        """Return the path, for pyarrow to open."""
        return str(self.path)

    def read(self, offset: int, num_bytes: int) -> Bytes:
        """Return a range. What lies before it is read and hashed too; one from before `position` is not.

        Raises EOFError if the file ends before the range does.
        """
        end = offset + num_bytes
        if offset < self.position:
            return self._read(offset, end)
        begin = self.position
        return self.upto(end)[offset - begin :]

    def upto(self, end: int) -> Bytes:
        """Return the bytes from `position` to `end`; then `position` is there.

        Raises ValueError for an end that lies before, EOFError for one behind the file's.
        """
        if not self.position <= end:
            raise ValueError(f"{end} lies before {self.position}")
        data = self._read(self.position, end)
        self._xxh3.update(data.data)
        self.position = end
        return data

    def tail(self, num_bytes: int) -> Bytes:
        """Return the file's last bytes, or all of them; neither hashed nor passed."""
        return self._read(max(0, self.num_bytes - num_bytes), self.num_bytes)

    def tail_xxh3(self, num_bytes: int) -> str:
        """Return the hex xxh3_128 of the file's last bytes, or of all of them; it takes one buffer."""
        xxh3 = xxhash.xxh3_128()
        begin = max(0, self.num_bytes - num_bytes)
        while begin < self.num_bytes:
            end = min(begin + READ_BYTES // 2, self.num_bytes)
            xxh3.update(self._read(begin, end).data)
            begin = end
        return xxh3.hexdigest()

    def rest(self) -> str:
        """Read to the end and return the hex xxh3_128 of the whole file."""
        while self.position < self.num_bytes:
            self.upto(min(self.position + READ_BYTES // 2, self.num_bytes))
        return self._xxh3.hexdigest()

    def _read(self, begin: int, end: int) -> Bytes:
        check_range(begin, end, self.num_bytes)
        if blocks_bytes(begin, end) > self._buffer.size:
            self._buffer = page_aligned(blocks_bytes(begin, end))
        return read_blocks(self._fd, begin, end, self._buffer)


def open_direct(path: Path, flags: int) -> int:
    """Open past the page cache, or through it where the file system has no other way."""
    try:
        return os.open(path, flags | os.O_DIRECT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, flags | os.O_CLOEXEC, 0o666)


def check_range(begin: int, end: int, file_bytes: int) -> None:
    """Hold a range against the file's length before memory is taken for it. Raises EOFError."""
    if not 0 <= begin <= end <= file_bytes:
        raise EOFError(f"the file ends at {file_bytes}, {end} was asked for")


def blocks_bytes(begin: int, end: int) -> int:
    """Return the length of the whole blocks that a range lies in."""
    return -(-end // BLOCK_BYTES) * BLOCK_BYTES - begin // BLOCK_BYTES * BLOCK_BYTES


def read_blocks(fd: int, begin: int, end: int, memory: Bytes) -> Bytes:
    """Read the whole blocks of a range to page-aligned `memory`, and return the range in it.

    Raises OSError, EOFError if the file ends before the range does.
    """
    skipped = begin % BLOCK_BYTES
    read_into(fd, begin - skipped, memory[: blocks_bytes(begin, end)], skipped + end - begin)
    return memory[skipped : skipped + end - begin]


def read_into(fd: int, offset: int, memory: Bytes, num_bytes: int) -> None:
    """Fill `memory` from `offset` on, at least `num_bytes` of it. Raises OSError, EOFError."""
    filled = 0
    while filled < num_bytes:
        part = memory[filled : filled + MAX_CALL_BYTES]
        try:
            count = os.preadv(fd, [part.data], offset + filled)
        except OSError as error:
            if not _refuses_direct(fd, error):
                raise
            continue
        if not count:
            raise EOFError(f"the file ends at {offset + filled}, {offset + num_bytes} was asked for")
        # A short read ends where the file does, or else on a block's border.
        filled += count


def _refuses_direct(fd: int, error: OSError) -> bool:
    """Say whether a call failed because of O_DIRECT, which is then given up for this file."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    if error.errno != errno.EINVAL or not flags & os.O_DIRECT:
        return False
    fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
    return True
