"""A machine without the data folder on which jobs cannot be captured: it rests, and fails nobody's job."""

import asyncio
import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from schemas.job import JobState
from service import host
from service.capture import attempt_files
from service.capture.engine import EngineSpec
from service.capture.engine_options import check_engine_options
from service.capture.link import EngineLink
from service.errors import DiskFull, EngineRefused
from service.settings import Settings
from service.store import commits, jobs, units, workers
from tests.support.desk import REPO, TOKEN
from tests.support.fake_engine import FakeEngine
from tests.support.fake_hub import FakeHub
from tests.support.jobs import Shop, conversations, request
from tests.support.machines import Machine, hub_at_once
from tests.support.roles import Capture, capture_until
from tests.support.tiny_model import random_target
from tests.support.waiting import until


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with hub_at_once(tmp_path, monkeypatch) as hub:
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
        # One more is given back unused if the worker's wait ends between its two looks for a unit.
        assert sum(unit.epoch for unit in shop.store.read(units.of_job, second)) in (3, 4)
        loop.stop.set()
        await running

    asyncio.run(asyncio.wait_for(served(), 120))


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC])
def test_a_machine_whose_scratch_cannot_be_written_rests_and_the_others_capture_its_jobs(
    shop: Shop, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """1. Alone, it blocks the job with the cause. 2. Resumed beside the healthy one, it harms none.

    Its engine goes on.
    """
    far = Machine(shop, tmp_path / "far", units_in_flight=2)
    make, start, started = attempt_files.make_folder, FakeEngine.start, []

    async def counted(self: FakeEngine, *given: Any) -> None:
        started.append(self)
        await start(self, *given)

    def refusing(folder: Path) -> None:
        if folder.is_relative_to(far.settings.data_dir):
            raise OSError(number, "planted", str(folder))
        make(folder)

    monkeypatch.setattr(attempt_files, "make_folder", refusing)
    monkeypatch.setattr(FakeEngine, "start", counted)
    first = pushed(shop, target, "first")
    far.capture(first)
    assert len(started) == 1
    problem = shop.store.read(jobs.job, first).problem
    assert shop.store.read(jobs.state, first) is JobState.BLOCKED and problem is not None
    assert "cannot write, and no other worker takes the model" in problem.detail
    shop.store.write(jobs.resume, first)
    job_ids = [first, *(pushed(shop, target, key) for key in ("second", "third"))]
    both(shop, Capture(far.store, far.settings, "far"), Capture(shop.store, shop.settings, "home"), job_ids)


def test_a_database_that_is_full_is_not_the_fault_of_a_machine_that_commits(
    shop: Shop, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. The database cannot grow at a commit: the job waits, as it does at home. 2. It is resumed."""
    far = Machine(shop, tmp_path / "far")
    job_id = pushed(shop, target, "first")
    commit, full = commits.commit, iter([DiskFull("the database cannot grow")])

    def committed(*given: Any) -> None:
        if (error := next(full, None)) is not None:
            raise error
        commit(*given)

    monkeypatch.setattr(commits, "commit", committed)
    far.capture(job_id)
    assert shop.store.read(jobs.state, job_id) is JobState.BLOCKED
    shop.store.write(jobs.resume, job_id)
    far.capture(job_id)
    assert shop.store.read(jobs.job, job_id).progress.is_captured


class NewerEngine(FakeEngine):
    """Of a worker that was upgraded."""

    async def start(self, spec: EngineSpec, settings: Settings, link: EngineLink) -> None:
        await super().start(spec, settings, link)
        self.info = self.info.model_copy(update={"version": "2"})


class MisspeltEngine(FakeEngine):
    """Of a worker with a misspelt engine option."""

    async def start(self, spec: EngineSpec, settings: Settings, link: EngineLink) -> None:
        check_engine_options({"max_num_seq": 8}, {"max_num_seqs"})


class OlderEngine(FakeEngine):
    """Of a worker that cannot run the model."""

    async def start(self, spec: EngineSpec, settings: Settings, link: EngineLink) -> None:
        raise EngineRefused("planted", field="model")


@pytest.mark.parametrize("engine", [NewerEngine, MisspeltEngine, OlderEngine])
def test_a_worker_with_another_engine_or_a_misspelt_option_fails_no_job(
    shop: Shop, target: Path, engine: type[FakeEngine]
) -> None:
    job_ids = [pushed(shop, target, str(number)) for number in range(4)]
    changes = {"engine": f"{__name__}:{engine.__name__}", "units_in_flight": 1}
    sick = shop.settings.model_copy(update=changes)
    shop.store.write(workers.beat, "healthy", shop.settings.lease_s)  # the sick one is never the only one
    both(shop, Capture(shop.store, sick, "sick"), Capture(shop.store, shop.settings, "healthy"), job_ids)


def ended(shop: Shop, job_id: str) -> bool:
    """Say whether a job is captured, or stopped."""
    job = shop.store.read(jobs.job, job_id)
    return job.progress.is_captured or job.state in (JobState.FAILED, JobState.BLOCKED)


def both(shop: Shop, sick: Capture, healthy: Capture, job_ids: list[str]) -> None:
    """Let two workers capture jobs, the sick one until the other one has captured all."""
    capture_until(lambda: all(ended(shop, job_id) for job_id in job_ids), sick, healthy)
    found = [shop.store.read(jobs.job, job_id) for job_id in job_ids]
    assert all(job.progress.is_captured for job in found), [job.problem for job in found]


def begin(shop: Shop, job_id: str) -> None:
    """Capture a part of a job."""
    loop = Capture(shop.store, shop.settings.model_copy(update={"units_in_flight": 1}), "old")
    capture_until(lambda: shop.store.read(jobs.job, job_id).progress.units_done > 0, loop, at_once=True)


def test_a_job_whose_engine_no_worker_has_any_more_is_blocked_until_one_comes(
    shop: Shop, target: Path
) -> None:
    """1. A job is begun. 2. The only worker was upgraded. 3. One with the old engine resumes it."""
    job_id = pushed(shop, target, "begun")

    begin(shop, job_id)
    old = shop.settings
    shop.settings = old.model_copy(update={"engine": f"{__name__}:NewerEngine"})
    shop.capture(job_id)
    job = shop.store.read(jobs.job, job_id)
    assert job.state is JobState.BLOCKED and job.problem is not None
    assert job.problem.type == "urn:quarry:engine-changed"
    assert job.problem.cure == "resume with fake 1, or submit a new job"
    shop.settings = old
    shop.store.write(jobs.resume, job_id)
    shop.capture(job_id)
    assert shop.store.read(jobs.job, job_id).progress.is_captured
