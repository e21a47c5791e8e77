"""One export at a time writes into a folder: two would give files their names in each other's middle."""

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from service.errors import OptionRefused

LOCK = ".export.lock"
"""Stays behind, empty: a lock file that is removed can be locked twice."""


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """Hold the folder `out`, made if need be, until the block or the process ends, however that comes.

    Raises OptionRefused (`out`) at once if another export holds it, or if it cannot be locked; OSError.
    """
    out.mkdir(parents=True, exist_ok=True)
    fd = os.open(out / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            cure = "wait for it to end, or name another folder in --out"
            detail = f"another export is writing to {out}"
            raise OptionRefused(detail, field="out", cure=cure) from error
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
            cure = "name a folder on a file system with locks in --out, and move it afterwards"
            detail = f"the file system of {out} has no locks, so that two exports could mix there"
            raise OptionRefused(detail, field="out", cure=cure) from error
        yield
    finally:
        os.close(fd)
