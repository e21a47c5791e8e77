"""The writers run on all cores, wherever the engine has bound their starter, and say why a unit fails."""

import errno
import os
import threading

import pytest

from connector import writers
from connector.pool import HostPool
from connector.repeats import RepeatCheck
from connector.writers import WriterPool
from schemas.receipts import SkipRow, UnitFailed
from tests.support.plans import identity, order, rank_config


def open_units(work_root, send, num_units=2):
    """Open units that have no plan and skip their row; each is answered on the thread of its own writer."""
    pool = HostPool(4096, pinned=False)
    told = WriterPool(rank_config(work_root), pool, send, RepeatCheck(1, 16))
    for unit in range(num_units):
        opening = order(identity(), 1, unit=unit)
        told.put(opening.attempt_id, opening)
        told.put(opening.attempt_id, SkipRow(attempt_id=opening.attempt_id, row=0))
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


class Failing:
    """A unit that fails when it is opened, or with its first row; the disk then refuses the deletion."""

    complete = False

    def __init__(self, error, opening):
        self._error = error
        if opening:
            raise error

    def skip(self, row):
        raise self._error

    def discard(self):
        raise OSError(errno.EROFS, "read-only")


@pytest.mark.parametrize(
    ("error", "opening", "reason"),
    [
        (FileNotFoundError(errno.ENOENT, "no plan"), True, "plan-unreadable"),
        (OSError(errno.ENOSPC, "full"), True, "write-failed"),
        (KeyError("a bug"), True, "internal"),
        (OSError(errno.EIO, "broken"), False, "write-failed"),
    ],
)
def test_an_attempt_that_fails_is_answered_with_the_reason(tmp_path, monkeypatch, error, opening, reason):
    monkeypatch.setattr(writers, "UnitWriter", lambda *_: Failing(error, opening))
    answers = []
    open_units(tmp_path, answers.append, num_units=1)
    failed = answers[-1]
    assert isinstance(failed, UnitFailed)
    assert (failed.reason, failed.errno) == (reason, getattr(error, "errno", None))
    assert ("read-only" in failed.detail) is not opening
