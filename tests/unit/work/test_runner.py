"""A task ends in one way: done, given back, failed, or left to whoever has it now; and that is recorded."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from schemas.job import JobState
from service.errors import DatasetBroken, DiskFull, LeaseLost, StoreUnavailable
from service.settings import Settings
from service.store import PublishLease, Store, jobs, migration, publishing, tasks
from service.work import runner
from service.work.keeper import Keeper, Kept, Stopped
from service.work.runner import LoopContext, run_next
from tests.support.store_cases import OWNER, TTL_S, capture, job_id


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store(f"sqlite:///{tmp_path / 'quarry.db'}")
    opened.write(migration.migrate)
    yield opened
    opened.close()


def context_of(store: Store, keeper: Keeper, stopped: Callable[[], bool] = lambda: False) -> LoopContext:
    return LoopContext(store, Settings(), OWNER, keeper, stopped)


def run(
    store: Store,
    error: BaseException | None,
    stopped: Callable[[], bool] = lambda: False,
) -> bool:
    """Run a publishing that ends with `error`."""

    def work(lease: PublishLease, kept: Kept) -> None:
        if error is not None:
            raise error
        store.write(publishing.complete, lease, None)

    take = lambda: publishing.lease(store, OWNER, TTL_S)  # noqa: E731
    with Keeper(store, TTL_S) as keeper:
        return run_next(context_of(store, keeper, stopped), take, work, max_attempts=3)


@pytest.fixture
def away(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first tries to record an error find no store."""
    fail, left = tasks.fail, iter([StoreUnavailable("away"), DiskFull("full")] * 2)

    def recorded(*given: Any) -> None:
        if (met := next(left, None)) is not None:
            raise met
        fail(*given)

    monkeypatch.setattr(tasks, "fail", recorded)


def test_a_task_whose_lease_is_no_longer_kept_is_given_back(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bug is of this process: neither the task nor its job is at fault."""

    def broken(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    def work(lease: PublishLease, kept: Kept) -> None:
        keeper._thread.join(60)
        kept.check()

    capture(store)
    monkeypatch.setattr(tasks, "extend", broken)
    with Keeper(store, 0.1) as keeper:
        take = partial(publishing.lease, store, OWNER, TTL_S)
        assert run_next(context_of(store, keeper), take, work, max_attempts=3)
    assert store.read(jobs.state, job_id(1)) is JobState.PUBLISHING
    assert publishing.lease(store, OWNER, TTL_S) is not None


def test_there_is_nothing_to_run_without_a_task(store: Store) -> None:
    assert run(store, None) is False


@pytest.mark.parametrize("error", [StoreUnavailable("away"), DiskFull("full")])
def test_a_lease_that_finds_no_store_is_for_later(store: Store, error: Exception) -> None:
    def take() -> None:
        raise error

    with Keeper(store, TTL_S) as keeper:
        assert run_next(context_of(store, keeper), take, pytest.fail, max_attempts=3) is False


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (None, JobState.COMPLETED),
        (Stopped(), JobState.PUBLISHING),
        (LeaseLost("to another"), JobState.PUBLISHING),
        (DatasetBroken("planted"), DatasetBroken("").outcome),
        (ZeroDivisionError("a bug, quoted \0"), JobState.FAILED),
    ],
)
def test_a_task_ends_as_its_work_does(store: Store, error: BaseException | None, state: str) -> None:
    capture(store)
    assert run(store, error) is True
    expected = {"block": JobState.BLOCKED, "fail": JobState.FAILED}.get(state, state)
    assert store.read(jobs.state, job_id(1)) is expected


@pytest.mark.parametrize("message", ["nobody foresaw this", "\ud800 " + "x" * 10_000])
def test_a_bug_fails_the_job_with_a_word_and_its_traceback_is_logged(
    store: Store, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    capture(store)
    run(store, KeyError(message))
    problem = store.read(jobs.job, job_id(1)).problem
    assert problem is not None and (problem.title, problem.status) == ("Internal error", 500)
    assert problem.detail.startswith("internal error: KeyError(") and ascii(message)[:10] in problem.detail
    assert len(problem.detail) < 1000 and problem.cure
    (record,) = [entry for entry in caplog.records if entry.exc_info]
    assert record.exc_info is not None and record.exc_info[0] is KeyError
    assert job_id(1) in record.getMessage()


def test_a_stopped_task_is_free_at_once(store: Store) -> None:
    capture(store)
    run(store, Stopped())
    lease = publishing.lease(store, "another", TTL_S)
    assert lease is not None and lease.attempts == 1


@pytest.mark.usefixtures("away")
def test_an_end_is_recorded_once_the_database_is_back(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "RECORD_S", 0.0)
    capture(store)
    run(store, ZeroDivisionError("a bug"))
    assert store.read(jobs.state, job_id(1)) is JobState.FAILED


@pytest.mark.usefixtures("away")
def test_a_process_that_ends_does_not_wait_for_the_database(store: Store) -> None:
    capture(store)
    run(store, ZeroDivisionError("a bug"), stopped=lambda: True)
    assert store.read(jobs.state, job_id(1)) is JobState.PUBLISHING
