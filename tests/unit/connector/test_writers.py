"""The writers run on all cores, wherever the engine has bound their starter, and say why a unit fails."""

import errno
import os
import threading

import pytest

from connector import writers
from connector.pool import HostPool
from connector.repeats import RepeatCheck
from connector.writers import WriterPool
from schemas.receipts import UnitFailed
from tests.support.plans import identity, order, rank_config


def open_units(work_root, send, num_units=2):
    """Open units that have no plan; each is answered on the thread of its own writer."""
    pool = HostPool(4096, pinned=False)
    told = WriterPool(rank_config(work_root), pool, send, RepeatCheck(1, 16))
    for unit in range(num_units):
        opening = order(identity(), 1, unit=unit)
        told.put(opening.key, opening)
    told.stop()


def test_writers_of_a_bound_thread_may_run_on_every_core_of_the_process(tmp_path):
    cores = {}

    def send(message):
        cores[threading.current_thread().name] = os.sched_getaffinity(0)

    def bound():
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        open_units(tmp_path, send)

    thread = threading.Thread(target=bound)
    thread.start()
    thread.join()
    expected = os.sched_getaffinity(os.getppid())
    assert cores == {"quarry-writer-0": expected, "quarry-writer-1": expected}


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (FileNotFoundError(errno.ENOENT, "no plan"), "plan-unreadable"),
        (OSError(errno.ENOSPC, "full"), "write-failed"),
        (KeyError("a bug"), "internal"),
    ],
)
def test_an_attempt_that_cannot_begin_is_answered_with_the_reason(tmp_path, monkeypatch, error, reason):
    def fail(*_):
        raise error

    monkeypatch.setattr(writers, "UnitWriter", fail)
    answers = []
    open_units(tmp_path, answers.append, num_units=1)
    (failed,) = answers
    assert isinstance(failed, UnitFailed)
    assert (failed.reason, failed.errno) == (reason, getattr(error, "errno", None))


def test_an_error_of_the_disk_in_an_open_attempt_is_no_fault_of_the_plan():
    assert writers._fail_reason(OSError(errno.EIO, "broken"), opening=False) == "write-failed"
