"""Functions that run in a process of their own, which what they read may end or hold up."""

import errno
import os
import resource
import signal
import time
from collections.abc import Callable
from contextlib import closing, suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from threading import Timer
from typing import Any, TypeVar

from service.errors import QuarryError
from service.lifeline import die_with_parent
from service.logs import log_to_stderr

R = TypeVar("R")

SPAWN = get_context("spawn")
"""A fork of a process that has computed with torch may wait forever."""

NO_MEMORY = errno.ENOMEM
"""The exit code of a process that lacked memory for what it read."""

KILLED_S = 5.0
"""That a process may take to end once it is killed."""


def start(function: Callable[..., None], *args: object) -> tuple[SpawnProcess, Connection]:
    """Run `function(connection, *args)` in a process; return it, and where what it sends arrives.

    It ends with the thread that called this. `args` must be small: until they are read, or forever if it ends
    before, this waits; more can be sent to it. Raises OSError.
    """
    ours, theirs = SPAWN.Pipe()
    child = SPAWN.Process(target=_run, args=(os.getpid(), function, theirs, *args), daemon=True)
    with closing(theirs):
        try:
            child.start()
        except OSError:
            ours.close()
            raise
    return child, ours


class Ended(Exception):
    """A process ended over what it read, or was ended; says how.

    `is_passing` where that was no fault of what it read: it was told to end, or the system lacks memory.
    """

    def __init__(self, how: str, *, is_passing: bool = False) -> None:
        super().__init__(how)
        self.is_passing = is_passing


def call(function: Callable[..., R], *args: object, memory_bytes: int, deadline_s: float) -> R:
    """Return what a function returns that may take so much memory and time.

    Raises its QuarryError, or one for a fault of the function; Ended, also for lack of memory.
    """
    try:
        child, ours = start(_answer, memory_bytes)
    except OSError as error:
        raise Ended(f"cannot start: {error.strerror}", is_passing=True) from error
    timer, late_s = Timer(deadline_s, child.kill), time.monotonic() + deadline_s
    timer.start()
    with closing(ours):
        try:
            ours.send((function, args))
            # It is killed then; where the system holds it, as a driver or a disk may, it is left.
            if not ours.poll(deadline_s + KILLED_S):
                raise Ended(f"took more than {deadline_s:g} s")
            is_right, answer = received(ours)
        except (EOFError, OSError):
            child.join()
            if time.monotonic() >= late_s:
                raise Ended(f"took more than {deadline_s:g} s") from None
            if child.exitcode == NO_MEMORY:
                raise Ended(f"took more than {memory_bytes} bytes of memory") from None
            if child.exitcode == 1:
                detail = f"{function.__name__} failed in a process of its own"
                raise QuarryError(detail, cure="look for the traceback in the log") from None
            told = child.exitcode in (-signal.SIGTERM, -signal.SIGKILL)
            raise Ended(f"ended with exit code {child.exitcode}", is_passing=told) from None
        finally:
            timer.cancel()
            child.kill()
            child.join(KILLED_S)
    if is_right:
        return answer  # type: ignore[no-any-return]  # what `function` returned
    raise answer


def received(connection: Connection) -> Any:  # noqa: ANN401 - whatever the process sends
    """Wait for what a process sends. Raises EOFError if it ends before, or within it."""
    try:
        return connection.recv()
    except OSError as error:
        raise EOFError from error


def limit_memory(num_bytes: int) -> None:
    """Let this process take at most so much more memory of its own, then it is a MemoryError.

    A few bytes can say that they decode to terabytes, and only the allocation can be asked.
    """
    os.environ.pop("RUST_BACKTRACE", None)  # a panic for lack of memory would wait forever for its own trace
    data_kib = Path("/proc/self/status").read_text().partition("VmData:")[2].split()[0]
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    with suppress(ValueError):  # a lower hard limit holds already
        resource.setrlimit(resource.RLIMIT_DATA, (int(data_kib) * 1024 + num_bytes, most))


def _run(parent_pid: int, function: Callable[..., None], *args: object) -> None:
    die_with_parent(parent_pid)
    if os.environ.get("QUARRY_LOG_FORMAT") == "json":  # what it says is a part of its parent's log
        log_to_stderr()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C ends the parent
    function(*args)


def _answer(parent: Connection, memory_bytes: int) -> None:
    function, args = parent.recv()
    limit_memory(memory_bytes)  # after the imports that this took: numpy's waits for memory without end
    try:
        try:
            answer: tuple[bool, object] = True, function(*args)
        except QuarryError as error:
            answer = False, error
        parent.send(answer)
    except (MemoryError, OSError) as error:
        if isinstance(error, OSError) and error.errno != errno.ENOMEM:
            raise
        os._exit(NO_MEMORY)
