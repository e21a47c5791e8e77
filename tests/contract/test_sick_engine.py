"""A worker whose engine dies fails nobody's job: it probes, says so, and rests; a unit at fault is named."""

import asyncio
import itertools
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from schemas.job import JobState
from service.capture.engine import Answer, Prompt
from service.errors import StoreUnavailable
from service.store import Store, jobs, units, workers
from service.store.database import Transaction
from service.worker import EXIT_OK, EXIT_RESTS, run_worker
from tests.contract.test_jobs import assert_whole
from tests.support.dying_engine import DIES
from tests.support.fake_engine import FakeEngine
from tests.support.jobs import FAKE_ENGINE, Shop, conversations, request
from tests.support.roles import Capture
from tests.support.waiting import until

DYING_ENGINE = "tests.support.dying_engine:DyingEngine"
CAUSE = "the device is gone"
POISON = 7
REST_S = 36.0
"""A pause is a hundredth of a second after the first death, and a tenth after the second."""


@pytest.fixture
def sick(tmp_path: Path, target: Path, url: str) -> Iterator[Shop]:
    """A worker whose engine dies as the environment says."""
    opened = Shop.open(
        tmp_path, target, database_url=url, engine=DYING_ENGINE, engine_rest_s=REST_S, unit_max_samples=2
    )
    yield opened
    opened.store.close()


def poisoned(count: int) -> list[dict[str, object]]:
    """Return samples of which the first ends every `DyingEngine` that is told so."""
    return [{"id": str(n), "token_ids": [POISON if n == 0 else 20 + n, 5, 6]} for n in range(count)]


@pytest.mark.slow
@pytest.mark.parametrize("dies", ["start", "step"])
def test_a_sick_worker_rests_and_the_healthy_one_finishes_the_job(
    sick: Shop, target: Path, monkeypatch: pytest.MonkeyPatch, dies: str
) -> None:
    """1. Two workers share a job. 2. The engine of one dies until it rests. 3. The other captures it all."""
    monkeypatch.setenv(DIES, dies)
    rested, run = asyncio.Event(), FakeEngine.run

    async def patient(self: FakeEngine, prompt: Prompt) -> Answer:
        await rested.wait()
        return await run(self, prompt)

    monkeypatch.setattr(FakeEngine, "run", patient)
    job_id = sick.submit(request(target, conversations(30), loss="all"))
    sick.plan()
    healthy = sick.settings.model_copy(update={"engine": FAKE_ENGINE})

    async def shared() -> str | None:
        loops = [Capture(sick.store, healthy, "healthy"), Capture(sick.store, sick.settings, "sick")]
        running = [asyncio.create_task(loops[0].run())]
        await until(lambda: len(sick.store.read(workers.present)) == 1)
        running.append(asyncio.create_task(loops[1].run()))
        await until(lambda: bool(sick.store.read(workers.sick, resting=True)))
        waits = sick.store.read(jobs.job, job_id).waits
        rested.set()
        await until(lambda: sick.store.read(jobs.job, job_id).progress.is_captured)
        for loop in loops:
            loop.stop.set()
        await asyncio.gather(*running)
        return waits

    assert (
        asyncio.run(asyncio.wait_for(shared(), 120))
        == f"worker {socket.gethostname()}'s engine dies: {CAUSE}"
    )
    sick.publish()
    job = sick.store.read(jobs.job, job_id)
    assert job.state is JobState.COMPLETED, job.problem
    assert job.waits is None
    assert_whole(sick, job_id, written=30, rejected=0)
    assert {row.attempts for row in sick.store.read(units.of_job, job_id)} == {1}
    assert sick.store.read(workers.present) == set()


@pytest.mark.parametrize("dies", ["start", "step"])
def test_the_only_worker_blocks_the_job_with_the_cause_and_a_resume_finishes_it(
    sick: Shop, target: Path, monkeypatch: pytest.MonkeyPatch, dies: str
) -> None:
    monkeypatch.setenv(DIES, dies)
    job = sick.run(request(target, conversations(10)))
    assert job.state is JobState.BLOCKED and job.problem is not None
    assert job.problem.type == "urn:quarry:engine-died"
    assert job.problem.detail == (
        f"worker {socket.gethostname()}'s engine dies, and no other worker takes the model: {CAUSE}"
    )
    assert job.progress.units_failed == 0
    assert {row.attempts for row in sick.store.read(units.of_job, job.id)} == {0}
    monkeypatch.delenv(DIES)
    sick.store.write(jobs.resume, job.id)
    assert sick.finish(job.id).state is JobState.COMPLETED
    assert_whole(sick, job.id, written=10, rejected=0)


def test_a_job_is_blocked_also_if_the_database_is_away_once_the_death_is_recorded(
    sick: Shop, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DIES, "start")
    block, asked = workers.block, itertools.count()

    def away_at_first(tx: Transaction, sickness: workers.Sickness) -> None:
        if next(asked) == 0:
            raise StoreUnavailable("planted")
        block(tx, sickness)

    monkeypatch.setattr(workers, "block", away_at_first)
    sick.patience_s = 30.0  # less than it rests
    assert sick.run(request(target, conversations(2))).state is JobState.BLOCKED


def test_a_job_is_blocked_also_if_the_answers_to_the_records_of_deaths_are_lost(
    sick: Shop, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DIES, "start")
    write = Store.write

    def answered(self: Store, verb: Callable[..., Any], *given: Any, **named: Any) -> Any:
        answer = write(self, verb, *given, **named)
        if verb is workers.engine_died:
            raise StoreUnavailable("planted")
        return answer

    monkeypatch.setattr(Store, "write", answered)
    sick.patience_s = 30.0  # less than it rests
    assert sick.run(request(target, conversations(2))).state is JobState.BLOCKED


@pytest.mark.parametrize(
    "broken",
    [
        "raise ImportError('libcudart.so.13: cannot open shared object file')",
        "raise OSError('undefined symbol: _ZN3c10')",
        "class Engine(",
        "",
    ],
)
def test_an_engine_that_cannot_be_imported_is_its_workers_fault_and_no_jobs(
    sick: Shop, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    (tmp_path / "damaged_engine.py").write_text(broken)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "damaged_engine", raising=False)
    sick.settings = sick.settings.model_copy(update={"engine": "damaged_engine:Engine"})
    job = sick.run(request(target, conversations(10)))
    assert job.state is JobState.BLOCKED and job.problem is not None
    assert "no other worker takes the model: the engine cannot be imported: " in job.problem.detail
    assert job.problem.cure == "fix the installation, then restart the worker; then resume"
    assert job.progress.units_failed == 0


@pytest.mark.slow
def test_an_engine_that_dies_after_some_units_costs_no_sample(
    sick: Shop, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A unit that runs alone after each death is proven, so the worker never rests. No unit is charged."""
    monkeypatch.setenv(DIES, "step:5")
    job = sick.run(request(target, conversations(30)))
    assert job.state is JobState.COMPLETED, job.problem
    assert_whole(sick, job.id, written=30, rejected=0)
    assert {row.attempts for row in sick.store.read(units.of_job, job.id)} == {1}


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_unit_that_ends_every_engine_fails_the_job_by_name_while_others_are_proven(
    sick: Shop, target: Path, monkeypatch: pytest.MonkeyPatch, num_workers: int
) -> None:
    monkeypatch.setenv(DIES, f"token:{POISON}")
    job_id = sick.submit(request(target, poisoned(80), loss="all"))
    sick.plan()

    async def together() -> None:
        loops = [Capture(sick.store, sick.settings, f"w{n}", job_id) for n in range(num_workers)]
        await asyncio.gather(*(loop.run() for loop in loops))

    asyncio.run(asyncio.wait_for(together(), 120))
    job = sick.store.read(jobs.job, job_id)
    assert job.state is JobState.FAILED and job.problem is not None
    assert job.problem.detail.startswith("engines die on unit 0 ")
    assert job.progress.units_failed == 1 and job.progress.units_done >= 2


def test_units_that_end_every_engine_block_a_job_and_a_resume_names_one_of_them(
    sick: Shop, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. The worker meets no other unit in three deaths, and rests. 2. Resumed, it begins with the others."""
    monkeypatch.setenv(DIES, f"token:{POISON}")
    samples = poisoned(40)
    samples[2]["token_ids"] = [POISON, 6, 5]  # of the second unit
    job_id = sick.submit(request(target, samples, loss="all"))
    sick.plan()
    for state, detail in ((JobState.BLOCKED, CAUSE), (JobState.FAILED, "engines die on unit 0 ")):
        sick.capture(job_id)
        job = sick.store.read(jobs.job, job_id)
        assert job.state is state and job.problem is not None and detail in job.problem.detail
        if state is JobState.BLOCKED:
            sick.store.write(jobs.resume, job_id)


def test_the_last_unit_of_a_job_that_ends_every_engine_blocks_it(
    sick: Shop, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is left to prove between its deaths, so it may be the worker's fault."""
    monkeypatch.setenv(DIES, f"token:{POISON}")
    job = sick.run(request(target, poisoned(2), loss="all"))
    assert job.state is JobState.BLOCKED and job.problem is not None
    assert CAUSE in job.problem.detail


@pytest.mark.slow
@pytest.mark.parametrize(("dies", "code"), [("start", EXIT_RESTS), ("", EXIT_OK)])
def test_a_worker_until_idle_that_rests_ends_with_a_code_of_its_own(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch, dies: str, code: int
) -> None:
    """1. It blocks the first job, which nobody else can run. 2. It leaves the second one to others."""
    monkeypatch.setenv(DIES, dies)
    shop = Shop.open(tmp_path, target, engine=DYING_ENGINE, engine_rest_s=360.0)
    job_ids = [shop.submit(request(target, conversations(3)), key) for key in ("first", "second")]
    assert run_worker(shop.settings, until_idle=True) == code
    states = [shop.store.read(jobs.state, job_id) for job_id in job_ids]
    assert (states == [JobState.COMPLETED] * 2) is (code == EXIT_OK)
    assert JobState.FAILED not in states
    shop.store.close()
