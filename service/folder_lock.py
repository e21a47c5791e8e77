"""A folder that one process at a time writes to."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from service.errors import OptionRefused


@contextmanager
def locked(lock: Path, busy: str, field: str, *, wait: bool = False) -> Iterator[None]:
    """Hold the file `lock`, made if need be, until the block or the process ends, however that comes.

    It stays behind, empty: a lock file that is removed can be locked twice. Raises OptionRefused, which says
    `busy` of `field`, at once if another process holds it, unless it is to `wait` for that one; OSError, also
    where it cannot be locked.
    """
    with lock.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError as error:
            cure = "wait for it to end, or name another folder in --out"
            raise OptionRefused(busy, field=field, cure=cure) from error
        yield
