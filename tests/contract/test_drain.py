"""A worker that stops lets the units in its engine end, and begins no other; an orphan waits for none."""

import asyncio
from pathlib import Path

import pytest

from schemas.job import JobState
from service.capture.engine import Answer, Prompt
from service.store import TaskState, units
from tests.contract.test_distrust import target
from tests.support.fake_engine import FakeEngine
from tests.support.jobs import Shop, conversations, request
from tests.support.roles import Capture
from tests.support.waiting import until


def test_a_worker_that_is_told_to_stop_commits_the_unit_in_its_engine_and_begins_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. A unit is in the engine, more wait. 2. SIGTERM. 3. Only then the engine answers."""
    model = target(tmp_path)
    shop = Shop.open(tmp_path, model, units_in_flight=1)
    job_id = shop.submit(request(model, conversations(20)))
    shop.plan()
    healthy = FakeEngine.run

    async def stopped() -> None:
        answering = asyncio.Event()

        async def run(self: FakeEngine, prompt: Prompt) -> Answer:
            await answering.wait()
            return await healthy(self, prompt)

        monkeypatch.setattr(FakeEngine, "run", run)
        loop = Capture(shop.store, shop.settings, "worker")
        async with asyncio.TaskGroup() as group:
            group.create_task(loop.run())
            await until(lambda: bool(loop._tasks()))
            loop.stop.set()
            answering.set()

    asyncio.run(asyncio.wait_for(stopped(), 60))
    first, *others = shop.store.read(units.of_job, job_id)
    assert (first.state, first.epoch) == (TaskState.DONE, 1)
    assert {(row.state, row.epoch) for row in others} == {(TaskState.PENDING, 0)}
    monkeypatch.setattr(FakeEngine, "run", healthy)
    assert shop.finish(job_id).state is JobState.COMPLETED
    assert {row.epoch for row in shop.store.read(units.of_job, job_id)} == {1}
    shop.store.close()


@pytest.mark.parametrize("drains", [False, True])
def test_a_worker_without_its_service_gives_back_what_its_engine_holds_also_while_it_drains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drains: bool
) -> None:
    """1. A unit is in an engine that does not answer. 2. SIGTERM, or not. 3. The service dies."""
    model = target(tmp_path)
    shop = Shop.open(tmp_path, model, units_in_flight=1, drain_s=1e6)
    job_id = shop.submit(request(model, conversations(20)))
    shop.plan()
    healthy = FakeEngine.run

    async def orphaned() -> None:
        asked = asyncio.Event()

        async def run(self: FakeEngine, prompt: Prompt) -> Answer:
            asked.set()
            await asyncio.Event().wait()
            raise AssertionError

        monkeypatch.setattr(FakeEngine, "run", run)
        loop = Capture(shop.store, shop.settings, "worker")
        async with asyncio.TaskGroup() as group:
            group.create_task(loop.run())
            await asked.wait()
            if drains:
                loop.stop.set()
                await asyncio.sleep(0.1)  # it drains now, or else a little later
            loop.stop_at_once()

    asyncio.run(asyncio.wait_for(orphaned(), 60))
    rows = shop.store.read(units.of_job, job_id)
    assert {(row.state, row.attempts, row.deaths) for row in rows} == {(TaskState.PENDING, 0, 0)}
    monkeypatch.setattr(FakeEngine, "run", healthy)
    assert shop.finish(job_id).state is JobState.COMPLETED
    assert [row.epoch for row in shop.store.read(units.of_job, job_id)] == [2] + [1] * (len(rows) - 1)
    shop.store.close()
