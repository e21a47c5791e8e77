"""Functions that run in a process of their own, because their input may crash or hang it."""

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
"""A fork of a process that has computed with torch may deadlock."""

NO_MEMORY = errno.ENOMEM
"""The exit code of a process that ran out of memory on its input."""

KILLED_S = 5.0
"""How long a process may take to end once it is killed."""


def start(function: Callable[..., None], *args: object) -> tuple[SpawnProcess, Connection]:
    """Run `function(connection, *args)` in a process; return the process and our end of the connection.

    The process ends with the thread that called this. `args` must be small: this blocks until they are read,
    forever if the process ends first; send larger data over the connection. Raises OSError.
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
    """A process crashed on its input, or was killed; the message says how.

    `is_passing` if its input was not at fault: it was told to end, or the system lacks memory.
    """

    def __init__(self, how: str, *, is_passing: bool = False) -> None:
        super().__init__(how)
        self.is_passing = is_passing


def call(function: Callable[..., R], *args: object, memory_bytes: int, deadline_s: float) -> R:
    """Call `function` in a process with these limits on memory and time, and return its result.

    Raises its QuarryError, or one for a bug in the function; Ended, also for lack of memory.
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
            # By then it was killed; if a driver or a disk keeps it from ending, it is left behind.
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
    """Wait for what a process sends. Raises EOFError if the process ends before or while sending it."""
    try:
        return connection.recv()
    except OSError as error:
        raise EOFError from error


def limit_memory(num_bytes: int) -> None:
    """Let this process allocate at most `num_bytes` more; beyond that it gets a MemoryError.

    A few bytes may claim to decode to terabytes, and only the allocation shows it.
    """
    os.environ.pop("RUST_BACKTRACE", None)  # a panic for lack of memory would hang while making its backtrace
    data_kib = Path("/proc/self/status").read_text().partition("VmData:")[2].split()[0]
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    with suppress(ValueError):  # a lower hard limit already applies
        resource.setrlimit(resource.RLIMIT_DATA, (int(data_kib) * 1024 + num_bytes, most))


def _run(parent_pid: int, function: Callable[..., None], *args: object) -> None:
    die_with_parent(parent_pid)
    if os.environ.get("QUARRY_LOG_FORMAT") == "json":  # its output is part of its parent's log
        log_to_stderr()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C ends the parent
    function(*args)


def _answer(parent: Connection, memory_bytes: int) -> None:
    function, args = parent.recv()
    limit_memory(memory_bytes)  # after the imports that `recv` made: numpy's hangs without memory
    try:
        try:
            answer: tuple[bool, object] = True, function(*args)
        except QuarryError as error:
            answer = False, error
        parent.send(answer)
    except BaseException as error:
        if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
            os._exit(NO_MEMORY)
        if not isinstance(error, Exception):  # the panic of a Rust library: it also aborts for lack of memory
            os.abort()
        raise
