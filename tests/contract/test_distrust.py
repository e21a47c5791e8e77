"""An engine is given up: what it captured beside wrong states, and a worker that is told to stop by then."""

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from connector.wire import StepWork
from schemas.job import JobState
from service.capture import unit_run
from service.capture.engine import EngineSpec
from service.capture.link import EngineLink
from service.errors import StatesWrong
from service.settings import Settings
from service.store import TaskState, jobs, units
from tests.support.fake_engine import FakeEngine
from tests.support.jobs import Shop, conversations, request
from tests.support.roles import Capture, capture_until
from tests.support.tiny_model import random_target

ONE_UNIT = {"shard_bytes": 4_194_304}


def target(folder: Path, name: str = "target", hidden: int = 64) -> Path:
    return random_target(folder / "models" / name, hidden=hidden, max_position=512)


def test_units_beside_one_with_wrong_states_are_captured_again_on_a_new_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. Two jobs share an engine, a unit each. 2. The first one's proof fails, again on a new engine. 3. The
    second one's, begun on the same engine, succeeds afterwards."""
    model = target(tmp_path)
    shop = Shop.open(tmp_path, model, units_in_flight=2)
    body = request(model, conversations(10), canary="skip", storage=ONE_UNIT)
    first, second = shop.submit(body, "first"), shop.submit(body, "second")
    check, both = unit_run.check_unit, threading.Barrier(2, timeout=60.0)
    attempts: list[int] = []

    def checked(**given: Any) -> Any:
        attempt_id = given["receipts"][0].attempt_id
        if attempt_id.job_id == first:
            if attempt_id.epoch == 1:
                both.wait()
            raise StatesWrong("planted")
        attempts.append(attempt_id.epoch)
        if len(attempts) == 1:
            both.wait()
            while shop.store.read(units.of_job, first)[0].problem is None:
                time.sleep(0.01)
        return check(**given)

    monkeypatch.setattr(unit_run, "check_unit", checked)
    shop.plan()
    shop.capture(second)
    shop.capture(first)
    shop.publish()
    assert shop.store.read(jobs.job, first).state is JobState.FAILED
    assert shop.store.read(jobs.job, second).state is JobState.COMPLETED
    assert attempts == [1, 2]
    shop.store.close()


def test_a_worker_is_told_to_stop_while_it_waits_for_the_units_of_another_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. A unit's proof takes long. 2. The next job needs another model, so another engine. 3. SIGTERM."""
    shop = Shop.open(tmp_path, target(tmp_path), units_in_flight=2, drain_s=0.0)
    other = target(tmp_path, "other", hidden=128)
    held, proving = threading.Event(), threading.Event()
    check = unit_run.check_unit

    def slow(**given: Any) -> Any:
        proving.set()
        assert held.wait(60.0)
        return check(**given)

    monkeypatch.setattr(unit_run, "check_unit", slow)
    for model in (tmp_path / "models" / "target", other):
        shop.submit(request(model, conversations(4), canary="skip", storage=ONE_UNIT), model.name)
    shop.plan()

    async def stopped() -> None:
        loop = Capture(shop.store, shop.settings, "worker")
        running = asyncio.create_task(loop.run())
        await asyncio.to_thread(proving.wait, 60.0)
        while len(loop._units) < 2:
            await asyncio.sleep(0.01)
        loop.stop.set()
        try:
            await asyncio.wait_for(running, 20)
        finally:
            held.set()

    asyncio.run(stopped())
    rows = [
        row for job in shop.store.read(jobs.page, limit=2)[0] for row in shop.store.read(units.of_job, job.id)
    ]
    assert [row.state for row in rows] == [TaskState.PENDING] * 2
    shop.store.close()


def test_a_worker_is_told_to_stop_while_its_engine_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. An engine takes for ever to start. 2. SIGTERM. 3. The unit is given back, the engine stopped."""
    model = target(tmp_path)
    shop = Shop.open(tmp_path, model, drain_s=1e6)
    seen: list[str] = []
    job_id = shop.submit(request(model, conversations(4), canary="skip", storage=ONE_UNIT))
    shop.plan()

    async def start(*_: object) -> None:
        seen.append("starts")
        await asyncio.Event().wait()

    async def stop(_: FakeEngine) -> None:
        seen.append("stopped")

    monkeypatch.setattr(FakeEngine, "start", start)
    monkeypatch.setattr(FakeEngine, "stop", stop)
    capture_until(lambda: bool(seen), Capture(shop.store, shop.settings, "worker"))
    (row,) = shop.store.read(units.of_job, job_id)
    assert (row.state, row.attempts) == (TaskState.PENDING, 0)
    assert seen == ["starts", "stopped"]
    shop.store.close()


def test_an_engine_that_keeps_a_row_to_itself_is_given_up_after_one_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. The first engine's scheduler half never hands over a row. 2. Another engine runs the unit again."""
    model = target(tmp_path)
    shop = Shop.open(tmp_path, model, receipt_timeout_s=2.0, unit_attempts=3)
    start = FakeEngine.start
    started: list[FakeEngine] = []
    epochs: set[int] = set()

    async def lossy(self: FakeEngine, spec: EngineSpec, settings: Settings, link: EngineLink) -> None:
        await start(self, spec, settings, link)
        started.append(self)
        take_work = self._scheduler.take_work

        def without_a_row() -> StepWork:
            work = take_work()
            epochs.update(item.ref.attempt_id.epoch for item in work.items)
            work.items = [item for item in work.items if item.ref.row != 2]
            return work

        if len(started) == 1:
            monkeypatch.setattr(self._scheduler, "take_work", without_a_row)

    monkeypatch.setattr(FakeEngine, "start", lossy)
    job = shop.run(request(model, conversations(10), canary="skip", storage=ONE_UNIT))
    assert job.state is JobState.COMPLETED, job.problem
    assert epochs == {1}
    assert len(started) >= 2  # on a slow machine a receipt of the second may be late, too
    shop.store.close()
