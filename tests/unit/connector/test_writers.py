"""The writers run on all cores, wherever the engine has bound their starter, and say why a unit fails.

Rows of one unit are encoded by several threads, and written in the order in which they came.
"""

import errno
import os
import queue
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor, wait

import pytest
import torch

from connector import writers
from connector.pool import HostPool
from connector.repeats import RepeatCheck
from connector.shards import UnitWriter
from connector.writers import CapturedRow, WriterPool
from schemas.names import attempt_dir
from schemas.receipts import SkipRow, UnitFailed, UnitOpened, UnitSealed
from tests.support.plans import JOB, identity, order, random_ids, rank_config, write_plan
from tests.support.sums import token_sums
from tests.unit.connector.test_shards import job, states


def open_units(work_root, send, num_units=2):
    """Open units that have no plan and skip their row; each is answered on the thread of its own writer."""
    pool = HostPool(4096, pinned=False)
    told = WriterPool(rank_config(work_root), pool, send, RepeatCheck(1, 16))
    for unit in range(num_units):
        opening = order(identity(), 1, unit=unit)
        told.put(opening.attempt_id, opening)
        told.put(opening.attempt_id, SkipRow(attempt_id=opening.attempt_id, row=0))
    told.stop()


def one_core():
    """Return a thread that is bound to one core, as vLLM's is that runs the model on a CPU."""
    return ThreadPoolExecutor(1, initializer=lambda: os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}))


def test_writers_of_a_bound_thread_may_run_on_every_core_of_the_process(tmp_path):
    cores = {}

    def send(message):
        cores[threading.current_thread().name] = os.sched_getaffinity(0)

    with one_core() as model:
        model.submit(open_units, tmp_path, send).result()
    expected = os.sched_getaffinity(os.getppid())
    assert cores == {"quarry-writer-0": expected, "quarry-writer-1": expected}


def test_torch_has_one_thread_in_a_writer_and_all_of_them_in_its_model(tmp_path, monkeypatch):
    """Otherwise the encoders would divide every step of fp8 among the cores, all of them at once.

    vLLM's worker on a CPU replaces torch's function by one that does nothing.
    """
    threads = {}

    def send(message):
        threads[threading.current_thread().name] = torch.get_num_threads()

    before = torch.get_num_threads()
    torch.set_num_threads(3)
    monkeypatch.setattr(torch, "set_num_threads", lambda num_threads: None)
    try:
        open_units(tmp_path, send)
        assert (set(threads.values()), torch.get_num_threads()) == ({1}, 3)
    finally:
        torch._C.set_num_threads(before)


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


ORDER = (5, 0, 7, 1, 2, 6, 3, 4)
"""In which the rows of a unit come."""
IDS = random_ids([40, 1, 17, 33, 64, 5, 128, 9])


def captured(pool, about, row, ids):
    """Return a row of the plan as the gather leaves it: in a slab, its sums taken."""
    made = job(about, ids, row)
    copied = states(about, ids)
    slab = pool.acquire(copied.nbytes)
    states_LTH = pool.tensor(slab, copied.dtype, copied.shape)
    states_LTH.copy_(copied)
    return CapturedRow(made, slab, states_LTH, token_sums(states_LTH))


def opened(work_root, about):
    """Return two writers and two encoders with one open unit, its attempt, their pool and their answers."""
    answers, pool = queue.Queue(), HostPool(2**20, pinned=False)
    running = WriterPool(rank_config(work_root), pool, answers.put, RepeatCheck(3, 4096))
    write_plan(work_root, IDS)
    opening = order(about, len(IDS))
    running.put(opening.attempt_id, opening)
    assert isinstance(answers.get(), UnitOpened)
    return running, opening.attempt_id, pool, answers


def drained(work_root, about, break_row=None):
    """Send the rows of one unit to writers and encoders, and return the last answer and the pool."""
    running, attempt_id, pool, answers = opened(work_root, about)
    for row in ORDER:
        item = captured(pool, about, row, IDS[row])
        if row == break_row:
            item.states_LTH.view(torch.int16)[1, 0, 3] ^= 1
        running.put(attempt_id, item)
    answer = answers.get()
    running.stop()
    assert not running.is_open(attempt_id) and answers.empty()
    return answer, pool


@pytest.mark.parametrize("compression", ["none", "planes", "fp8"])
def test_rows_that_several_threads_encode_are_the_bytes_and_the_order_of_one(
    tmp_path, monkeypatch, compression
):
    """1. The first row's encoder waits for the second row's. 2. The file is what one thread writes.

    The encoders may run on every core of the process, as the writers.
    """
    about = identity(compression=compression)
    healthy, second, threads = UnitWriter.encode, threading.Event(), set()

    def encode(self, made, *given):
        threads.add((threading.current_thread().name, frozenset(os.sched_getaffinity(0))))
        if made.ref.row == ORDER[0]:
            assert second.wait(60)
        encoded = healthy(self, made, *given)
        if made.ref.row == ORDER[1]:
            second.set()
        return encoded

    monkeypatch.setattr(UnitWriter, "encode", encode)
    with one_core() as model:
        answer, pool = model.submit(drained, tmp_path / "several", about).result()
    cores = frozenset(os.sched_getaffinity(os.getppid()))
    assert threads == {("quarry-encoder_0", cores), ("quarry-encoder_1", cores)}
    monkeypatch.undo()

    write_plan(tmp_path / "one", IDS)
    alone = UnitWriter(order(about, len(IDS)), rank_config(tmp_path / "one"), RepeatCheck(3, 4096))
    for row in ORDER:
        item = captured(pool, about, row, IDS[row])
        alone.write(item.job, item.states_LTH, item.sums_LT)
        pool.release(item.slab)
    assert isinstance(answer, UnitSealed) and answer.rows == ORDER
    assert answer == alone.seal()
    several, one = (tmp_path / name / attempt_dir(JOB, 0, 1) / answer.file for name in ("several", "one"))
    assert several.read_bytes() == one.read_bytes()
    assert pool.acquire(pool.num_bytes) is not None


def test_what_an_encoder_refuses_fails_its_unit_by_name_and_frees_every_slab(tmp_path):
    answer, pool = drained(tmp_path, identity(compression="planes"), break_row=ORDER[3])
    assert isinstance(answer, UnitFailed) and answer.reason == "states-wrong"
    assert answer.detail.startswith(f"row {ORDER[3]}: states are no longer what was copied")
    assert not list(tmp_path.rglob("train-*"))
    assert pool.acquire(pool.num_bytes) is not None


def test_a_writer_that_waits_keeps_no_row_that_it_has_written(tmp_path, monkeypatch):
    about, healthy, released = identity(compression="planes"), UnitWriter.encode, []
    running, attempt_id, pool, answers = opened(tmp_path, about)

    def encode(self, *given):
        encoded = healthy(self, *given)
        released.append(threading.Event())
        weakref.finalize(encoded.ids, released[-1].set)
        return encoded

    monkeypatch.setattr(UnitWriter, "encode", encode)
    for row in ORDER:
        running.put(attempt_id, captured(pool, about, row, IDS[row]))
    assert isinstance(answers.get(), UnitSealed)
    kept = [row for row, one in enumerate(released) if not one.wait(5)]
    running.stop()
    assert (len(released), kept) == (len(ORDER), [])


def test_the_slab_of_a_failed_units_row_is_not_free_while_an_encoder_writes_to_it(tmp_path, monkeypatch):
    """1. The first row fails its unit. 2. The second's encoder ends once its writer waits for it."""
    about = identity(compression="planes")
    running, attempt_id, pool, answers = opened(tmp_path, about)
    healthy, begun, going = UnitWriter.encode, threading.Event(), threading.Event()
    ended, freed = [], []
    first, second = (captured(pool, about, row, IDS[row]) for row in ORDER[:2])
    first.states_LTH.view(torch.int16)[1, 0, 3] ^= 1

    def encode(self, made, *given):
        if made == second.job:
            begun.set()
        assert (going if made == second.job else begun).wait(60)
        try:
            return healthy(self, made, *given)
        finally:
            ended.append(made)

    def wait_for(encodings):
        if not encodings[0].done():
            going.set()
        wait(encodings)

    def release(slab):
        freed.append((slab, second.job in ended))
        if slab == second.slab:
            going.set()

    monkeypatch.setattr(UnitWriter, "encode", encode)
    monkeypatch.setattr(writers, "wait", wait_for)
    monkeypatch.setattr(pool, "release", release)
    for item in (first, second):
        running.put(attempt_id, item)
    assert isinstance(answers.get(), UnitFailed)
    running.stop()
    assert freed == [(first.slab, False), (second.slab, True)]
