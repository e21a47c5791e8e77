"""A week of scheduled runs on vLLM over a folder that grows, pushed to a local Hub."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from sqlalchemy import update

from schemas.job import RESTING_JOB_STATES, JobState
from schemas.schedule import RunOutcome, RunView
from service.artifacts.dataset_files import HubFiles
from service.proof.verify import verify_dataset
from service.store import Store, jobs, schedules
from service.store.schedule_tables import SCHEDULE
from service.work.worker_process import WorkerProcess, worker_command
from tests.support.desk import REPO, TOKEN, writable_hub
from tests.support.fake_hub import FakeHub
from tests.support.hub_client import HubClient
from tests.support.nights import NAME, Nights, names
from tests.support.real_engine import vllm_shop
from tests.support.store_cases import Clock
from tests.support.tiny_model import random_target
from tests.support.waiting import until


class LeapDay(Clock):
    """The real clock, by which the worker goes, too: a night comes when its slot is moved to now."""

    CRON = "0 3 29 2 *"

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store

    def advance(self, seconds: float) -> None:
        with self._store.writing() as tx:
            tx.connection.execute(update(SCHEDULE).values(next_slot=tx.now))


class Week:
    """The nights, the Hub, and a worker."""

    def __init__(self, nights: Nights, hub: FakeHub, client: HubClient, log: Path) -> None:
        self.nights, self.hub, self._client, self._log = nights, hub, client, log

    @contextmanager
    def worker(self) -> Iterator[WorkerProcess]:
        """Run a worker, which is killed at the end."""
        with self._log.open("ab") as log:
            worker = WorkerProcess(worker_command(), self.nights.shop.settings.with_secrets(), log)
            try:
                yield worker
            finally:
                worker.kill()
                asyncio.run(until(lambda: worker.exit_code() is not None))

    def wait(self) -> RunView:
        """Wait until every job rests; return the newest run."""

        def over() -> bool:
            return all(job.state in RESTING_JOB_STATES for job in self.nights.jobs())

        asyncio.run(until(over, patience_s=300.0, poll_s=0.1))
        return self.nights.run()

    def complete(self) -> None:
        """Wait; the run is complete, the repository loads and is right, and no sample is there twice."""
        assert self.wait().job_state is JobState.COMPLETED, (self.nights.job().problem, self._log.read_text())
        settings = self.nights.shop.settings
        remote = HubFiles(REPO, endpoint=settings.hub_endpoint, token=settings.token())
        report = verify_dataset(remote)
        assert report.ok, str(report)
        for counts in self.loaded().values():
            assert set(counts.values()) == {1}, counts

    def loaded(self) -> dict[str | None, Counter[str]]:
        """Return how often `datasets` reads each sample from the Hub, by the template of its job."""
        rows = self._client.ask("load", repo_id=REPO, token=TOKEN, config=None, streaming=False)["rows"]
        templates = {
            job.id: job.identity.template_sha256 for job in self.nights.jobs() if job.identity is not None
        }
        found: dict[str | None, Counter[str]] = defaultdict(Counter)
        for row in rows:
            found[templates[Path(row["shard"]).parent.name]][row["source_id"]] += 1
        return found


@pytest.fixture
def week(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Week]:
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")  # of the worker
    target = random_target(tmp_path / "models" / "target", hidden=64, max_position=512)
    with writable_hub(tmp_path, monkeypatch) as hub:
        shop = vllm_shop(
            tmp_path,
            target,
            cpu_kv_cache_gib=1,
            hub_endpoint=hub.url,
            hub_token=TOKEN,
            source_roots=(tmp_path / "incoming",),
            unit_max_samples=4,
        )
        rules = {"cron": LeapDay.CRON, "overlap": "replace", "request": {"hub": {"repo_id": REPO}}}
        nights = Nights(shop, LeapDay(shop.store), target, tmp_path / "incoming", **rules)
        with HubClient("lfs", tmp_path / "reader", hub.url) as client:
            yield Week(nights, hub, client, tmp_path / "log")
        nights.store.close()


@pytest.mark.engine
def test_a_week_of_nights_pushes_every_sample_once(week: Week) -> None:
    """1. Two nights. 2. On the third the worker is killed. 3. The fourth replaces its job, which
    ends with what it wrote, and takes the rest. 4. The fifth has no new file and pushes nothing. 5. On the
    sixth the template is another one: the job is refused, and takes all when the schedule says so. 6. The
    seventh takes what is new. After each night the dataset loads, `quarry verify` is content, and no sample
    is there twice; at the end each is there once under each template.
    """
    nights = week.nights
    with week.worker():
        for night in (range(12), range(12, 20)):
            nights.drop(night)
            nights.submit()
            week.complete()
        nights.drop(range(20, 200))
        nights.submit()
        killed = nights.job().id

        def half_done() -> bool:
            return nights.store.read(jobs.job, killed).progress.samples_written > 0

        asyncio.run(until(half_done, patience_s=200.0, poll_s=0.02))
    assert nights.job().state is JobState.RUNNING
    with week.worker():
        nights.drop(range(200, 206))
        nights.submit()
        week.complete()
        replaced = nights.store.read(jobs.job, killed)
        assert replaced.state is JobState.COMPLETED and replaced.progress.samples_given_up > 0
        (written,) = week.loaded().values()
        assert written == Counter(names(range(206)))
        commits = len(week.hub.repo(REPO).commits)
        nights.submit()
        week.complete()
        assert nights.run().detail == "no new samples"
        assert len(week.hub.repo(REPO).commits) == commits
        nights.change_template("other")
        nights.drop(range(206, 210))
        nights.submit()
        assert week.wait().job_state is JobState.FAILED
        problem = nights.job().problem
        assert problem is not None and problem.type == "urn:quarry:recipe-changed"
        nights.change(changed_recipe="begin_anew")
        nights.store.write(jobs.resume, nights.job().id)
        week.complete()
        nights.drop(range(210, 214))
        nights.submit()
        week.complete()
        assert nights.job().progress.samples_written == 4
    first, second = sorted(week.loaded().values(), key=len)
    assert (first, second) == (Counter(names(range(206))), Counter(names(range(214))))
    outcomes = [run.outcome for run in nights.store.read(schedules.past, NAME)][::-1]
    assert outcomes == [RunOutcome.CUT_SHORT if night == 2 else RunOutcome.SUBMITTED for night in range(7)]
