"""The only way a file gets its final name: temporary name in the same folder, fsync, rename, folder fsync."""

import errno
import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

BLOCK_BYTES = 2**20


def temporary(final: Path, attempt: str = "") -> Path:
    """Return the name that a file has until it is sealed.

    It is hidden, and in the same folder, so that the rename is atomic. `attempt` distinguishes writers of the
    same file.
    """
    return final.with_name(f".{final.name}{attempt and '.'}{attempt}.tmp")


def fsync(path: Path) -> None:
    """Make a file's bytes, or a folder's entries, durable. Raises OSError."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_folder(folder: Path, root: Path | None = None) -> None:
    """Create a folder and its missing parents durably. Raises OSError.

    An existing folder is synced, too: another process may have just created it. A missing `root` is not
    created: that raises FileNotFoundError.
    """
    if not folder.is_dir():
        if folder == root:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(folder))
        make_folder(folder.parent, root)
        folder.mkdir(exist_ok=True)
    with suppress(PermissionError):  # a process that may not read the parent cannot have created this folder
        fsync(folder.parent)


def sha256_of(path: Path, watch: Callable[[], None] = lambda: None) -> tuple[str, int]:
    """Return the hex sha256 and the length in bytes of a file. Raises OSError, and what `watch` raises."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
            watch()
        return digest.hexdigest(), file.tell()


def seal(final: Path, attempt: str = "") -> None:
    """Give the complete file at `temporary(final, attempt)` its final name, durably. Raises OSError.

    If an error occurs before the rename, there is no file with the final name.
    """
    temp = temporary(final, attempt)
    fsync(temp)
    temp.replace(final)
    fsync(final.parent)


@contextmanager
def sealing(final: Path, attempt: str = "", root: Path | None = None) -> Iterator[Path]:
    """Yield the temporary path to write to; seal the file on success, remove it on any error.

    Folders are created as by `make_folder`.
    """
    make_folder(final.parent, root)
    temp = temporary(final, attempt)
    try:
        yield temp
        seal(final, attempt)
    except BaseException:
        temp.unlink(missing_ok=True)
        raise


def seal_bytes(final: Path, content: bytes, attempt: str = "", root: Path | None = None) -> None:
    """Write and seal a small file, as `sealing` does. Raises OSError."""
    with sealing(final, attempt, root) as temp:
        temp.write_bytes(content)


def move_durably(source: Path, final: Path) -> None:
    """Move a sealed file to another folder on the same file system.

    Several processes may do so at once: on return the move is durable, whoever made it. Raises OSError;
    FileNotFoundError if the file is in neither place; then no folder is created.
    """
    if not source.exists() and not final.exists():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(source))
    make_folder(final.parent)
    try:
        source.replace(final)
    except FileNotFoundError:
        if not final.exists():
            raise
    fsync(final.parent)
    # The process that moved the folder's last file may have removed the folder.
    with suppress(FileNotFoundError):
        fsync(source.parent)
