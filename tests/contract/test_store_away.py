"""A store that is away for a while ends no worker, no planner and no job, and costs no attempt.

One that is full is away, too; but what a disk's end stopped in the middle of its work waits for a person.

| loop, and what it asks of the store | away | full |
| --- | --- | --- |
| worker: sweep, a look at its one job | later | later |
| capture: lease, summary, heartbeat, give back | later, or the lease runs out | the same |
| capture: canary | the unit runs again, uncounted | the job waits |
| capture: commit | tried again, then the unit runs again, uncounted | the job waits |
| capture: a failed attempt | the lease runs out | the same |
| planner: identity, unit, end | planned again, uncounted | the job waits |
| publisher: commits, canary, end | tried again | the job waits |
| supervisor: nothing | - | - |

Leases, extensions and failed tries of a planner and a publisher: `tests/unit/work`.
"""

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest

from schemas.job import JobState
from service.capture.engine import Answer, EngineSpec, Prompt
from service.capture.link import EngineLink
from service.errors import DiskFull, EngineDied, QuarryError, StoreUnavailable
from service.settings import Settings
from service.store import Store, TaskState, jobs, units
from tests.contract.test_distrust import ONE_UNIT, target
from tests.support.fake_engine import FakeEngine
from tests.support.jobs import FAKE_ENGINE, Shop, conversations, request
from tests.support.roles import Capture, capture_until, run_planning, run_publishing
from tests.support.store_cases import Clock
from tests.support.waiting import until

BEATS = 3
SHARE = 0.4
"""Three calls that take such a share of a lease each are longer than the lease, two are not."""

AWAY = StoreUnavailable("away")
FULL = DiskFull("it cannot grow")
TO_A_WORKER = pytest.mark.parametrize("error", [AWAY, FULL], ids=["away", "full"])
"""A worker knows two ways in which its store is away."""
LATER_S = 2.0
"""After every lease of these tests, and after the longest delay of a task."""


class Away:
    """Stands for a verb of the store and raises `error` when first called.

    Each call takes `takes_s` of the clock.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        verb: str,
        clock: Clock,
        takes_s: float = 0.0,
        error: QuarryError = AWAY,
    ) -> None:
        self._clock, self._takes_s, self._error = clock, takes_s, error
        self.calls = 0
        self.kept = threading.Event()
        """Set once the calls have taken longer than a lease of which each takes `SHARE`."""
        name = f"service.store.{verb}"
        stood_for = resolve_name(name)
        if verb.endswith(".lease"):  # opens transactions of its own
            monkeypatch.setattr(name, lambda *given, **named: self._call(partial(stood_for, *given, **named)))
            return
        for opens in ("read", "write"):
            monkeypatch.setattr(Store, opens, self._opening(stood_for, getattr(Store, opens)))

    def _opening(self, stood_for: object, healthy: Callable[..., Any]) -> Callable[..., Any]:
        """Return `Store.read` or `Store.write` with a verb that this stands for."""

        def opened(store: Store, verb: object, *given: Any, **named: Any) -> Any:
            call = partial(healthy, store, verb, *given, **named)
            return self._call(call) if verb is stood_for else call()

        return opened

    def _call(self, healthy: Callable[[], Any]) -> Any:
        self.calls += 1
        self._clock.advance(self._takes_s)
        if self.calls == 1:
            raise self._error
        answer = healthy()
        if self.calls >= BEATS:
            self.kept.set()
        return answer


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def shop(tmp_path: Path, clock: Clock) -> Iterator[Shop]:
    """A shop whose store goes by `clock`: a lease runs out only where a test says so."""
    made = Shop.open(tmp_path, target(tmp_path), lease_s=1.0)
    made.store.close()
    made.store = Store(made.settings.database(), clock.of(made.settings.database()))
    yield made
    made.store.close()


def submit(shop: Shop, **changes: Any) -> str:
    (root,) = shop.settings.model_roots
    body: dict[str, Any] = {"canary": "skip", "storage": ONE_UNIT} | changes
    return shop.submit(request(root / "target", conversations(20), **body))


def attempts(shop: Shop, job_id: str) -> Counter[tuple[TaskState, int, int]]:
    """Return how many units of a job stand at a state, an epoch and a number of attempts."""
    return Counter((row.state, row.epoch, row.attempts) for row in shop.store.read(units.of_job, job_id))


def test_a_worker_that_cannot_look_at_its_one_job_looks_again(shop, clock, monkeypatch) -> None:
    job_id = submit(shop)
    shop.store.write(jobs.cancel, job_id)
    Away(monkeypatch, "jobs.job", clock)
    capture = Capture(shop.store, shop.settings, "worker", only_job=job_id)
    assert [asyncio.run(capture._finished()) for _ in range(2)] == [False, True]


@TO_A_WORKER
def test_a_worker_that_finds_no_store_looks_for_work_later(
    shop: Shop, clock: Clock, monkeypatch: pytest.MonkeyPatch, error: QuarryError
) -> None:
    job_id = submit(shop)
    shop.plan()
    away = Away(monkeypatch, "units.lease", clock, error=error)
    assert shop.finish(job_id).state is JobState.COMPLETED
    assert away.calls > 1
    assert attempts(shop, job_id) == {(TaskState.DONE, 1, 1): 1}


@pytest.mark.parametrize(
    ("verb", "engine", "canary", "error"),
    [
        *(
            pytest.param(verb, "tests.support.model_engine:ModelEngine", "run", error, marks=pytest.mark.slow)
            for verb in ("canaries.report", "canaries.record")
            for error in (AWAY, FULL)
        ),
        ("commits.commit", FAKE_ENGINE, "skip", FULL),
    ],
)
def test_a_unit_that_finds_no_store_runs_again_and_on_a_full_disk_its_job_waits(
    shop: Shop,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    verb: str,
    engine: str,
    canary: str,
    error: QuarryError,
) -> None:
    """The unit has one attempt: an error that counted would fail its job."""
    shop.settings = shop.settings.model_copy(update={"unit_attempts": 1, "engine": engine})
    job_id = submit(shop, canary=canary)
    shop.plan()
    away = Away(monkeypatch, verb, clock, error=error)
    if error is FULL:
        shop.capture(job_id)
        assert shop.store.read(jobs.state, job_id) is JobState.BLOCKED
        shop.store.write(jobs.resume, job_id)
    assert shop.finish(job_id).state is JobState.COMPLETED, shop.store.read(jobs.job, job_id).problem
    assert away.calls > 1
    assert attempts(shop, job_id) == {(TaskState.DONE, 2, 1): 1}


def test_a_commit_waits_for_the_store(shop: Shop, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """1. A unit is proven. 2. Its commit finds no store. 3. It is committed later."""
    job_id = submit(shop)
    shop.plan()
    away = Away(monkeypatch, "commits.commit", clock)
    assert shop.finish(job_id).state is JobState.COMPLETED
    assert away.calls == 2
    assert attempts(shop, job_id) == {(TaskState.DONE, 1, 1): 1}


@TO_A_WORKER
def test_a_unit_is_kept_over_a_beat_that_finds_no_store(
    shop: Shop, clock: Clock, monkeypatch: pytest.MonkeyPatch, error: QuarryError
) -> None:
    """1. A unit is captured for longer than its lease. 2. The first beat finds no store, the next does."""
    job_id = submit(shop)
    shop.plan()
    away = Away(monkeypatch, "tasks.extend", clock, SHARE * shop.settings.lease_s, error)
    healthy = FakeEngine.run

    async def run(self: FakeEngine, prompt: Prompt) -> Answer:
        await until(away.kept.is_set)
        return await healthy(self, prompt)

    monkeypatch.setattr(FakeEngine, "run", run)
    assert shop.finish(job_id).state is JobState.COMPLETED
    assert attempts(shop, job_id) == {(TaskState.DONE, 1, 1): 1}


def test_a_unit_is_kept_while_proofs_fill_the_loops_threads(
    shop: Shop, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. A unit is captured. 2. Every thread of the loop's pool is busy for longer than the unit's lease."""
    job_id = submit(shop)
    shop.plan()
    kept = Away(monkeypatch, "tasks.extend", clock, SHARE * shop.settings.lease_s)
    proven = threading.Event()

    async def captured() -> None:
        loop = Capture(shop.store, shop.settings, "worker", only_job=job_id)
        pool = ThreadPoolExecutor(2)
        asyncio.get_running_loop().set_default_executor(pool)
        async with asyncio.TaskGroup() as group:
            group.create_task(loop.run())
            await until(lambda: bool(loop._tasks()))
            proofs = [pool.submit(proven.wait, 60.0) for _ in range(2)]
            try:
                await until(kept.kept.is_set)
                assert units.lease(shop.store, "another", shop.settings.lease_s) is None
            finally:
                proven.set()
        assert all(proof.result() for proof in proofs)

    asyncio.run(asyncio.wait_for(captured(), shop.patience_s))
    assert attempts(shop, job_id) == {(TaskState.DONE, 1, 1): 1}


@TO_A_WORKER
def test_a_failed_attempt_is_recorded_when_the_store_is_back(
    shop: Shop, clock: Clock, monkeypatch: pytest.MonkeyPatch, error: QuarryError
) -> None:
    """1. An engine does not start. 2. There is no store to record that, and then there is."""
    shop.settings = shop.settings.model_copy(update={"engine_rest_s": 1e-6})  # the clock stands still
    job_id = submit(shop)
    shop.plan()
    away = Away(monkeypatch, "workers.engine_died", clock, error=error)
    start, broken = FakeEngine.start, iter([True])

    async def started(self: FakeEngine, spec: EngineSpec, settings: Settings, link: EngineLink) -> None:
        if next(broken, False):
            raise EngineDied("planted")
        await start(self, spec, settings, link)

    monkeypatch.setattr(FakeEngine, "start", started)
    assert shop.finish(job_id).state is JobState.COMPLETED
    assert away.calls == 2
    assert attempts(shop, job_id) == {(TaskState.DONE, 2, 1): 1}


@TO_A_WORKER
def test_a_worker_that_stops_without_a_store_stops_its_engine_and_lets_its_units_run_out(
    shop: Shop, clock: Clock, monkeypatch: pytest.MonkeyPatch, error: QuarryError
) -> None:
    """1. Two units are in an engine that takes forever. 2. SIGTERM. 3. They cannot be given back."""
    monkeypatch.setenv("QUARRY_FAKE_STEP_S", "600")
    shop.settings = shop.settings.model_copy(update={"drain_s": 0.0})
    job_id = submit(shop, storage={"shard_bytes": 262_144})
    shop.plan()
    Away(monkeypatch, "tasks.release_owner", clock, error=error)
    loop = Capture(shop.store, shop.settings, "worker")
    capture_until(lambda: len(loop._tasks()) == 2, loop)
    assert loop._engine.session is None
    assert attempts(shop, job_id)[TaskState.LEASED, 1, 1] == 2
    clock.advance(LATER_S)
    monkeypatch.delenv("QUARRY_FAKE_STEP_S")
    assert shop.finish(job_id).state is JobState.COMPLETED


@TO_A_WORKER
@pytest.mark.parametrize("verb", ["commits.unit_commits", "publishing.complete"])
def test_a_job_that_finds_no_store_is_published_again_and_on_a_full_disk_it_waits(
    shop: Shop, clock: Clock, monkeypatch: pytest.MonkeyPatch, verb: str, error: QuarryError
) -> None:
    job_id = submit(shop)
    shop.plan()
    shop.capture(job_id)
    Away(monkeypatch, verb, clock, error=error)
    assert run_publishing(shop.store, shop.settings, "publisher", lambda: False) is True
    if error is FULL:
        assert shop.store.read(jobs.state, job_id) is JobState.BLOCKED
        shop.store.write(jobs.resume, job_id)
    assert shop.store.read(jobs.state, job_id) is not JobState.COMPLETED
    clock.advance(LATER_S)
    assert shop.finish(job_id).state is JobState.COMPLETED


@pytest.mark.slow
@TO_A_WORKER
@pytest.mark.parametrize("verb", ["plans.set_identity", "plans.add_unit", "plans.finish"])
def test_a_plan_that_finds_no_store_is_made_again_and_on_a_full_disk_its_job_waits(
    shop: Shop, clock: Clock, monkeypatch: pytest.MonkeyPatch, verb: str, error: QuarryError
) -> None:
    """The job may be tried once: an error that counted would block it."""
    shop.settings = shop.settings.model_copy(update={"unit_attempts": 1})
    job_id = submit(shop, storage={"shard_bytes": 262_144})
    Away(monkeypatch, verb, clock, error=error)
    assert run_planning(shop.store, shop.settings, "planner", lambda: False) is True
    job = shop.store.read(jobs.job, job_id)
    assert job.state is (JobState.BLOCKED if error is FULL else JobState.RUNNING)
    assert not job.progress.plan_done
    if error is FULL:
        shop.store.write(jobs.resume, job_id)
    clock.advance(LATER_S)
    shop.plan()
    job = shop.store.read(jobs.job, job_id)
    assert job.state is JobState.RUNNING and job.progress.plan_done
    assert job.progress.samples_planned == 20
