"""A machine without the data folder on which jobs cannot be captured: it rests, and fails nobody's job."""

import asyncio
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from schemas.job import JobState
from service import host
from service.store import jobs, storing, units, workers
from tests.support.desk import REPO, TOKEN, writable_hub
from tests.support.engine_bench import until
from tests.support.fake_hub import FakeHub
from tests.support.jobs import Shop, conversations, request
from tests.support.machines import Machine
from tests.support.roles import Capture
from tests.support.tiny_model import random_target


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    monkeypatch.setattr(storing, "APART", timedelta(0))
    monkeypatch.setattr(storing, "LATEST", timedelta(0))
    with writable_hub(tmp_path, monkeypatch) as hub:
        yield hub


@pytest.fixture
def shop(tmp_path: Path, target: Path, hub: FakeHub) -> Iterator[Shop]:
    shop = Shop.open(
        tmp_path,
        target,
        hub_endpoint=hub.url,
        hub_token=TOKEN,
        model_roots=(target.parent, tmp_path / "others"),
        engine_rest_s=36.0,
        unit_max_samples=3,
    )
    host.host_of(shop.store, shop.settings)
    yield shop
    shop.store.close()


def pushed(shop: Shop, model: Path, key: str) -> str:
    """Submit a job that any machine may capture, and plan it."""
    samples = conversations(12, longest=20)
    body = request(model, samples, layers=(1, 2), hub={"repo_id": f"{REPO}-{key}"})
    job_id = shop.submit(body, key)
    shop.plan()
    return job_id


def test_a_machine_that_lacks_a_model_after_it_served_another_rests_and_serves_the_next(
    shop: Shop, target: Path, tmp_path: Path
) -> None:
    """1. It captures a job. 2. It lacks the second one's model, which blocks. 3. It captures the third."""
    other = random_target(tmp_path / "others" / "other", hidden=128, max_position=512)
    first = pushed(shop, target, "first")
    far = Machine(shop, tmp_path / "far", model_roots=(target.parent,))

    async def served() -> None:
        loop = Capture(far.store, far.settings, "far")
        running = asyncio.create_task(loop.run())
        await until(lambda: shop.store.read(jobs.job, first).progress.is_captured)
        second = await asyncio.to_thread(pushed, shop, other, "second")
        third = await asyncio.to_thread(pushed, shop, target, "third")
        await until(lambda: shop.store.read(jobs.job, third).progress.is_captured)
        await until(lambda: shop.store.read(jobs.state, second) is JobState.BLOCKED)
        (sickness,) = shop.store.read(workers.sick, resting=True)
        assert sickness.deaths == 3
        assert sum(unit.epoch for unit in shop.store.read(units.of_job, second)) == 3
        loop.stop.set()
        await running

    asyncio.run(asyncio.wait_for(served(), 120))
