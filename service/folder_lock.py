"""A lock that lets one process at a time write to a folder."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from service.errors import OptionRefused


@contextmanager
def locked(lock: Path, busy: str, field: str, *, wait: bool = False) -> Iterator[None]:
    """Hold the file `lock`, created if missing, until the block or the process ends in whatever way.

    The file is left behind, empty: a lock file that is removed can be locked twice. If another process holds
    it, `wait` for that process, or raise OptionRefused for `field` with the message `busy`. Raises OSError,
    also if the file cannot be locked.
    """
    with lock.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError as error:
            cure = "wait for it to end, or name another folder in --out"
            raise OptionRefused(busy, field=field, cure=cure) from error
        yield
