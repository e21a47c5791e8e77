"""A unit whose lease is lost leaves the engine and the connector at once, and the worker goes on."""

import asyncio
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from schemas.job import JobState
from service.capture.attempt_files import attempt_folder
from service.capture.engine import Answer, EngineSpec, Prompt
from service.capture.link import EngineLink
from service.host import host_of
from service.settings import Settings
from service.store import hosts, jobs
from tests.contract.test_distrust import ONE_UNIT, target
from tests.support.fake_engine import FakeEngine
from tests.support.jobs import Shop, conversations, request
from tests.support.roles import Capture
from tests.support.waiting import until

ENDED_ROWS = 2
FOR_EVER_S = 600.0


def captured(shop: Shop, job_id: str) -> bool:
    progress = shop.store.read(jobs.job, job_id).progress
    return progress.plan_done and progress.units_done == progress.units_planned


def test_a_cancelled_jobs_unit_is_abandoned_and_the_next_job_completes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. Of a unit two rows are written, the others take for ever. 2. Its job is cancelled. 3. Another comes.

    The lost unit fills the engine, so that the other one finds room only if all of it was given back.
    """
    model = target(tmp_path)
    shop = Shop.open(tmp_path, model, lease_s=1.0, units_in_flight=1, in_flight_requests=2)
    body = request(model, conversations(10), canary="skip", storage=ONE_UNIT)
    first = shop.submit(body, "first")
    shop.plan()
    healthy = FakeEngine.run

    async def run(self: FakeEngine, prompt: Prompt) -> Answer:
        if self.requests == ENDED_ROWS:
            self.step_delay_s = FOR_EVER_S
        return await healthy(self, prompt)

    monkeypatch.setattr(FakeEngine, "run", run)

    async def served() -> str:
        loop = Capture(shop.store, shop.settings, "worker")
        async with asyncio.TaskGroup() as group:
            group.create_task(loop.run())
            await until(lambda: bool(loop._tasks()))
            (key,) = loop._units
            session, folder = loop._engine.session, attempt_folder(shop.settings, key)
            assert session is not None and isinstance(session.engine, FakeEngine)
            engine, link = session.engine, session.link
            await until(lambda: engine.computing == 2 and any(folder.glob("*")))
            shop.store.write(jobs.cancel, first)
            await until(lambda: not loop._units and engine.computing == 0)
            assert not link._attempts
            await until(lambda: not any(folder.glob("*")))
            engine.step_delay_s = 0.0
            second = shop.submit(body, "second")
            await asyncio.to_thread(shop.plan)
            await until(lambda: captured(shop, second))
            loop.stop.set()
        return second

    second = asyncio.run(asyncio.wait_for(served(), 60))
    shop.publish()
    assert shop.store.read(jobs.state, first) is JobState.CANCELLED
    assert shop.store.read(jobs.state, second) is JobState.COMPLETED
    shop.store.close()


def test_an_engines_start_ends_with_the_lease_that_it_is_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. An engine starts for a unit, for hours. 2. Its job is cancelled. 3. The next job is served."""
    model = target(tmp_path)
    shop = Shop.open(tmp_path, model, lease_s=1.0, units_in_flight=1)
    body = request(model, conversations(4), canary="skip", storage=ONE_UNIT)
    first, second = shop.submit(body, "first"), shop.submit(body, "second")
    shop.plan()
    start, healthy = FakeEngine.start, FakeEngine.run
    asked_for: set[str] = set()

    async def run(self: FakeEngine, prompt: Prompt) -> Answer:
        assert prompt.ref is not None
        asked_for.add(prompt.ref.attempt_id.job_id)
        return await healthy(self, prompt)

    monkeypatch.setattr(FakeEngine, "run", run)

    async def served() -> None:
        starting = asyncio.Event()

        async def late(self: FakeEngine, spec: EngineSpec, settings: Settings, link: EngineLink) -> None:
            if not starting.is_set():
                starting.set()
                await asyncio.Event().wait()
            await start(self, spec, settings, link)

        monkeypatch.setattr(FakeEngine, "start", late)
        loop = Capture(shop.store, shop.settings, "worker", only_job=second)
        async with asyncio.TaskGroup() as group:
            group.create_task(loop.run())
            await starting.wait()
            shop.store.write(jobs.cancel, first)

    asyncio.run(asyncio.wait_for(served(), 60))
    shop.publish()
    assert asked_for == {second}
    assert shop.store.read(jobs.state, first) is JobState.CANCELLED
    assert shop.store.read(jobs.state, second) is JobState.COMPLETED
    shop.store.close()


def test_an_engine_starts_once_the_old_one_is_gone_also_if_the_lease_is_lost_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. A job makes room for another one's model. 2. That job is cancelled. 3. The next one is served."""
    models = target(tmp_path), target(tmp_path, "other", hidden=128)
    shop = Shop.open(tmp_path, models[0], lease_s=1.0, units_in_flight=1)
    job_ids = [
        shop.submit(
            request(model, conversations(4), canary="skip", storage=ONE_UNIT, layers=(1, 2)), str(number)
        )
        for number, model in enumerate((*models, models[0]))
    ]
    shop.plan()
    start, stop = FakeEngine.start, FakeEngine.stop
    there: list[FakeEngine] = []
    most: list[int] = []

    async def started(self: FakeEngine, *given: Any) -> None:
        there.append(self)
        most.append(len(there))
        await start(self, *given)

    async def served() -> None:
        stopping = asyncio.Event()

        async def slow(self: FakeEngine) -> None:
            stopping.set()
            await asyncio.to_thread(time.sleep, 2.0)
            await stop(self)
            there.remove(self)

        monkeypatch.setattr(FakeEngine, "start", started)
        monkeypatch.setattr(FakeEngine, "stop", slow)
        loop = Capture(shop.store, shop.settings, "worker")
        async with asyncio.TaskGroup() as group:
            group.create_task(loop.run())
            await stopping.wait()
            shop.store.write(jobs.cancel, job_ids[1])
            await until(lambda: captured(shop, job_ids[2]))
            loop.stop.set()

    asyncio.run(asyncio.wait_for(served(), 60))
    assert most == [1, 1]
    shop.store.close()


def test_a_machine_is_seen_again_soon_however_long_its_leases_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that is seen less often than `GAP_S` is away each time, and can be lost between two beats."""
    monkeypatch.setattr("service.capture.loop.GAP_S", 1.0)
    shop = Shop.open(tmp_path, target(tmp_path), lease_s=86_400.0)

    def seen_at() -> datetime:
        return shop.store.read(hosts.views)[0].seen_at

    async def seen_again() -> None:
        host_of(shop.store, shop.settings)
        loop, first = Capture(shop.store, shop.settings, "worker"), seen_at()
        async with asyncio.TaskGroup() as group:
            group.create_task(loop.run())
            await until(lambda: seen_at() > first)
            first = seen_at()
            await until(lambda: seen_at() > first)
            loop.stop.set()

    asyncio.run(asyncio.wait_for(seen_again(), 60))
    shop.store.close()
