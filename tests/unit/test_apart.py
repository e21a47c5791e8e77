"""What runs in a process of its own ends alone, however it ends."""

import mmap
import os
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy
import pytest

from service import apart
from service.errors import QuarryError


def dies_in_its_answer() -> bytes:
    """Return what the process is killed over when it has sent the beginning, as for lack of memory."""

    def begin(connection: Connection, buf: Any, write: object = None) -> None:
        os.write(connection.fileno(), bytes(buf)[:6])
        os._exit(9)

    Connection._send = begin  # type: ignore[attr-defined]  # in the child alone
    return bytes(100)


def stops_in_its_answer() -> bytes:
    """Return what the process stops over when it has sent the beginning."""

    def begin(connection: Connection, buf: Any, write: object = None) -> None:
        os.write(connection.fileno(), bytes(buf)[:6])
        time.sleep(600)

    Connection._send = begin  # type: ignore[attr-defined]  # in the child alone
    return bytes(100)


def test_an_answer_that_does_not_come_whole_is_late() -> None:
    with pytest.raises(apart.Ended, match="took more than 3 s"):
        apart.call(stops_in_its_answer, memory_bytes=2**30, deadline_s=3)


class EndsAtStart:
    """Ends the process that reads what it is started with."""

    def __reduce__(self) -> tuple[Callable[[int], None], tuple[int]]:
        return os._exit, (7,)


def test_a_process_that_ends_before_it_reads_what_it_is_given_has_ended() -> None:
    """More than a pipe holds; an import that fails ends it there, and a signal to the group."""
    with pytest.raises(apart.Ended, match="exit code 7"):
        apart.call(len, bytes(2**23), memory_bytes=EndsAtStart(), deadline_s=60)  # type: ignore[arg-type]


def killed() -> None:
    """End as the system ends a process for lack of memory."""
    os.kill(os.getpid(), signal.SIGKILL)


def test_what_ends_by_no_fault_of_its_own_says_so() -> None:
    with pytest.raises(apart.Ended) as ended:
        apart.call(killed, memory_bytes=2**30, deadline_s=60)
    assert ended.value.is_passing


class Panic(BaseException):
    """What a library in Rust raises, at times for lack of memory; like pyo3's, no Exception."""


def panics() -> None:
    raise Panic


def test_a_panic_is_a_crash_and_no_fault_of_the_function() -> None:
    with pytest.raises(apart.Ended, match="ended with exit code -6"):
        apart.call(panics, memory_bytes=2**30, deadline_s=60)


def test_a_process_that_cannot_be_killed_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that waits for a driver or a lost disk: its end is nobody's to force."""
    monkeypatch.setattr(apart.SPAWN.Process, "kill", lambda child: None)
    monkeypatch.setattr(apart, "KILLED_S", 0.1)
    with pytest.raises(apart.Ended, match="took more than 1 s"):
        apart.call(time.sleep, 20, memory_bytes=2**30, deadline_s=1)


def test_a_process_that_ends_within_its_answer_has_ended() -> None:
    with pytest.raises(apart.Ended, match="ended with exit code 9"):
        apart.call(dies_in_its_answer, memory_bytes=2**30, deadline_s=60)


def test_its_imports_count_in_no_memory_bound() -> None:
    """numpy's wait without end where they lack it."""
    assert apart.call(numpy.mean, [1, 2], memory_bytes=2**24, deadline_s=60) == 1.5


def mapped(num_bytes: int) -> bytes:
    with mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE) as memory:
        return memory[:1]


@pytest.mark.parametrize("function", [bytes, mapped])
def test_what_takes_more_memory_has_ended_by_that(function: Callable[[int], bytes]) -> None:
    with pytest.raises(apart.Ended, match="took more than 16777216 bytes of memory"):
        apart.call(function, 2**26, memory_bytes=2**24, deadline_s=60)


def test_a_fault_of_the_function_is_no_fault_of_what_it_read() -> None:
    with pytest.raises(QuarryError, match="int failed in a process of its own"):
        apart.call(int, "x", memory_bytes=2**30, deadline_s=60)
