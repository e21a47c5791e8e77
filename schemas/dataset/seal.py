"""The one way a file gets its final name.

Temporary name in the same folder, fsync, rename, fsync of the folder.
"""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import xxhash


def footer_xxh3(tail: bytes | memoryview) -> str:
    """Return the hex xxh3_128 of a Parquet file's footer with its length and the magic.

    `tail` ends as the file does.

    Raises ValueError if it holds no whole footer.
    """
    num_bytes = int.from_bytes(tail[-8:-4], "little") + 8
    if tail[-4:] != b"PAR1" or num_bytes > len(tail):
        raise ValueError("the file does not end with a Parquet footer")
    return xxhash.xxh3_128_hexdigest(tail[-num_bytes:])


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


def make_folder(folder: Path) -> None:
    """Make a folder, and those above it that are missing, durably. Raises OSError.

    The name of one that is there is synced too: another process may have made it in this moment.
    """
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
    with suppress(PermissionError):  # nobody who may not read the folder above has just made this one
        fsync_folder(folder.parent)


def sha256_of(path: Path) -> tuple[str, int]:
    """Return the hex sha256 and the length in bytes of a file. Raises OSError."""
    with path.open("rb", buffering=0) as file:
        digest = hashlib.file_digest(file, "sha256")
        return digest.hexdigest(), file.tell()


def seal(final: Path) -> None:
    """Give the complete file at `temporary(final)` its final name, durably. Raises OSError.

    Then nothing final exists.
    """
    temp = temporary(final)
    _fsync(temp)
    _name(temp, final)


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
    """Yield the temporary path to write to; name it durably on success, remove it on any error."""
    make_folder(final.parent)
    temp = temporary(final)
    try:
        yield temp
        seal(final)
    except BaseException:
        temp.unlink(missing_ok=True)
        raise


def move_durably(source: Path, final: Path) -> None:
    """Move a sealed file to another folder of the same filesystem.

    Doing it again is harmless, also at the same time: when this returns the move is durable, whoever made it.

    Raises OSError; FileNotFoundError if the file is in neither place.
    """
    make_folder(final.parent)
    try:
        source.replace(final)
    except FileNotFoundError:
        if not final.exists():
            raise
    fsync_folder(final.parent)
    # Whoever moved the folder's last file may have removed it.
    with suppress(FileNotFoundError):
        fsync_folder(source.parent)
