"""The file calls of this process below a folder: one meets a full disk, or something is done before it.

Python's audit hook sees a call before it is made, and what it raises, the call raises. What pyarrow and
safetensors open themselves it does not see; the folder is made and synced before such a file, and the file
is synced behind it. Threads count together.
"""

import errno
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from schemas.dataset.seal import fsync

WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT
NAME_EVENTS = {"os.mkdir", "os.rename"}


class FileCalls:
    """Counts calls below `folder`, and acts at number `at`; at every later one too if it `stays`."""

    def __init__(
        self, folder: Path, at: int, act: Callable[[str], None], *, only_writes: bool, stays: bool
    ) -> None:
        self._folder, self._at, self._act = f"{folder}/", at, act
        self._only_writes, self._stays = only_writes, stays
        self._lock = threading.Lock()
        self.acted = False

    def call(self, event: str, args: tuple[Any, ...]) -> None:
        """Count a call that is about to be made; raises what the act raises."""
        if event not in NAME_EVENTS and event != "open":
            return
        path = _path(args[1] if event == "os.rename" else args[0])
        is_of_database = path.startswith(f"{self._folder}quarry.db")
        if not path.startswith(self._folder) or is_of_database:
            return
        if self._only_writes and event == "open" and not (args[2] & WRITE_FLAGS or _is_synced()):
            return
        with self._lock:
            self._at -= 1
            acts = self._at == 0 or (self._stays and self._at < 0)
        if acts:
            self.acted = True
            self._act(path)


_counted: FileCalls | None = None


def _hook(event: str, args: tuple[Any, ...]) -> None:
    if _counted is not None:
        _counted.call(event, args)


sys.addaudithook(_hook)


def _path(name: object) -> str:
    return os.fsdecode(name) if isinstance(name, str | bytes | os.PathLike) else ""


def _is_synced() -> bool:
    """Say whether what is being opened is a file or folder that is synced next."""
    frame = sys._getframe()
    while frame.f_globals is globals() and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code is fsync.__code__


@contextmanager
def _counting(calls: FileCalls) -> Iterator[FileCalls]:
    global _counted
    _counted = calls
    try:
        yield calls
    finally:
        _counted = None


@contextmanager
def full_disk(folder: Path, at: int, *, stays: bool) -> Iterator[FileCalls]:
    """In this block the write call `at` below a folder finds no space, and all later ones if it `stays`."""

    def fail(path: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    with _counting(FileCalls(folder, at, fail, only_writes=True, stays=stays)) as calls:
        yield calls


@contextmanager
def meanwhile(folder: Path, at: int, act: Callable[[], None]) -> Iterator[FileCalls]:
    """In this block `act` is called before file call `at` below a folder, by the thread that makes it."""

    def interrupt(path: str) -> None:
        global _counted
        _counted = None
        act()

    with _counting(FileCalls(folder, at, interrupt, only_writes=False, stays=False)) as calls:
        yield calls
