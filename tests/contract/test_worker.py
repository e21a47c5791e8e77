"""The worker process as a whole: what keeps its parts alive must not end in silence."""

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import service.worker
from schemas.job import JobState
from service.settings import Settings
from service.store import Store
from service.sweeper import sweep
from service.worker import PlannerProcess, PublisherThread, _keep, run_worker
from tests.support.children import wait_for_end
from tests.support.engine_bench import until
from tests.support.store_cases import a_request, job_id


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(data_dir=tmp_path, poll_s=0.05)


@pytest.fixture
def store(settings: Settings) -> Iterator[Store]:
    store = Store(settings.database())
    store.migrate()
    yield store
    store.close()


def test_a_worker_whose_keeper_broke_ends_with_its_error(settings, monkeypatch):
    """1. The sweep at the start is well. 2. The next one meets a bug. 3. The worker ends."""
    sweeps = iter([sweep])

    def failing(store, settings):
        done = next(sweeps, None)
        if done is None:
            raise ZeroDivisionError("a bug")
        return done(store, settings)

    monkeypatch.setattr(service.worker, "sweep", failing)
    monkeypatch.setattr(service.worker, "RESTART_S", 0.05)
    monkeypatch.setattr(service.worker, "SWEEP_S", 0.0)
    with pytest.raises(ZeroDivisionError):
        run_worker(settings)


def test_a_planner_that_was_killed_is_started_again_and_plans(settings, store):
    """1. The planner is alive and left alone. 2. It is killed. 3. The next one reads what is submitted."""
    planner = PlannerProcess(settings)
    planner.start()
    try:
        killed = planner._process
        planner.restart_if_dead()
        assert planner._process is killed
        os.kill(killed.pid, signal.SIGKILL)
        wait_for_end(killed.pid)
        planner.restart_if_dead()
        assert planner._process.pid != killed.pid
        request = a_request().model_copy(update={"model": "/nowhere"})
        store.submit(job_id(1), "key", request)
        asyncio.run(until(lambda: store.state(job_id(1)) is JobState.FAILED))
        assert planner._process.is_alive()
    finally:
        planner.stop()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_publisher_that_ended_by_an_error_is_started_again_but_not_after_its_stop(settings, monkeypatch):
    """1. The publisher meets a bug, and its thread ends. 2. The next one works. 3. Stopped, it stays so."""
    bugs = iter([ZeroDivisionError("a bug")])
    works = threading.Event()

    def publishing(*_):
        if (bug := next(bugs, None)) is not None:
            raise bug
        works.set()
        return False

    monkeypatch.setattr("service.publish.publisher.run_publishing", publishing)
    publisher = PublisherThread(settings)
    publisher.start()
    publisher._thread.join(60)
    try:
        assert not works.is_set()
        publisher.restart_if_dead()
        assert works.wait(60)
        again = publisher._thread
        publisher.restart_if_dead()
        assert publisher._thread is again
    finally:
        publisher.stop()
    publisher.restart_if_dead()
    assert publisher._thread is again and not again.is_alive()


class Watched:
    """A planner or publisher that counts how often somebody looked whether it is dead."""

    def __init__(self) -> None:
        self.looks = 0

    def restart_if_dead(self) -> None:
        self.looks += 1


def test_the_keeper_looks_after_the_planner_and_the_publisher_again_and_again(settings, store, monkeypatch):
    monkeypatch.setattr(service.worker, "RESTART_S", 0.01)
    planner, publisher = Watched(), Watched()

    async def keep() -> None:
        keeper = asyncio.create_task(_keep(store, settings, planner, publisher))
        await until(lambda: min(planner.looks, publisher.looks) > 1)
        keeper.cancel()
        await asyncio.wait({keeper})

    asyncio.run(keep())
