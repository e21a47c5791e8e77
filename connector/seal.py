"""The one way a file gets its final name.

Temporary name in the same folder, fsync, hash, rename, fsync of the folder.
"""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import xxhash

HASH_CHUNK_BYTES = 8 * 2**20


@dataclass(frozen=True, slots=True)
class Sealed:
    """A durable file: what stands under its final name after a power cut."""

    path: Path
    sha256: str
    xxh3: str
    num_bytes: int


def temporary(final: Path) -> Path:
    """Return the name a file has until it is sealed.

    Hidden, and in the same folder, so that the rename is atomic.
    """
    return final.with_name(f".{final.name}.tmp")


def fsync_folder(folder: Path) -> None:
    """Make the entries of `folder` durable. Raises OSError."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sha256_of(path: Path) -> tuple[str, int]:
    """Return the hex sha256 and the length in bytes of a file. Raises OSError."""
    digest, num_bytes = hashlib.sha256(), 0
    buffer = bytearray(HASH_CHUNK_BYTES)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(view[:count])
            num_bytes += count
    return digest.hexdigest(), num_bytes


def xxh3_of(path: Path) -> str:
    """Return the hex xxh3_128 of a file: at the speed of memory, for reading it again. Raises OSError."""
    digest = xxhash.xxh3_128()
    buffer = bytearray(HASH_CHUNK_BYTES)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(view[:count])
    return digest.hexdigest()


def _hashes_of(path: Path) -> tuple[str, str, int]:
    """Return the hex sha256, the hex xxh3_128 and the length in bytes, in one pass. Raises OSError."""
    sha256, xxh3, num_bytes = hashlib.sha256(), xxhash.xxh3_128(), 0
    buffer = bytearray(HASH_CHUNK_BYTES)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            sha256.update(view[:count])
            xxh3.update(view[:count])
            num_bytes += count
    return sha256.hexdigest(), xxh3.hexdigest(), num_bytes


def seal(final: Path) -> Sealed:
    """Give the complete file at `temporary(final)` its final name, durably. Raises OSError.

    Then nothing final exists.

    The hashes are taken from the file as the kernel holds it after fsync, not from the writer's buffers.
    """
    temp = temporary(final)
    _fsync(temp)
    sha256, xxh3, num_bytes = _hashes_of(temp)
    _name(temp, final)
    return Sealed(final, sha256, xxh3, num_bytes)


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _name(temp: Path, final: Path) -> None:
    temp.replace(final)
    fsync_folder(final.parent)


@contextmanager
def sealing(final: Path) -> Iterator[Path]:
    """Yield the temporary path to write to; name it durably on success, remove it on any error.

    Nobody asks for its hashes, so none are taken.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    temp = temporary(final)
    try:
        yield temp
        _fsync(temp)
        _name(temp, final)
    except BaseException:
        temp.unlink(missing_ok=True)
        raise


def move_durably(source: Path, final: Path) -> None:
    """Move a sealed file to another folder of the same filesystem; doing it again is harmless.

    Raises OSError.
    """
    if not source.exists() and final.exists():
        return
    final.parent.mkdir(parents=True, exist_ok=True)
    source.replace(final)
    fsync_folder(final.parent)
    fsync_folder(source.parent)
