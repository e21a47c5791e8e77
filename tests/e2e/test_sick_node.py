"""Two worker processes on one PostgreSQL, one on a sick node: its engine dies at its start or first step."""

import asyncio
import json
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from schemas.job import JobState
from service.settings import Settings
from service.store import JobRow, Store, jobs, units, workers
from service.store.workers import PAUSES
from service.work.worker_process import WorkerProcess, worker_command
from tests.contract.test_jobs import assert_whole
from tests.support.dying_engine import DIES
from tests.support.jobs import ENDED, Shop, request
from tests.support.pg import Postgres
from tests.support.real_engine import VLLM, assert_states, stored_rows
from tests.support.tiny_model import random_target
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(3600)
NUM_SAMPLES, NUM_ON_VLLM = 2_000, 60
SAYS = f"worker {socket.gethostname()}'s engine dies"
PATIENCE_S = 1500.0


@dataclass
class Cluster:
    """A database and a data folder, and what its workers log."""

    shop: Shop
    folder: Path
    running: ExitStack

    def worker(self, engine: str) -> WorkerProcess:
        """Start a worker whose engine this is; it ends with the test."""
        settings = self.shop.settings.model_copy(update={"engine": engine})
        return self.running.enter_context(running(settings, self.folder / f"{engine.split(':')[1]}.log"))

    def submit(self, target: Path, count: int, **changes: object) -> str:
        """Submit a job of `count` samples in a file."""
        samples = self.folder / "samples.jsonl"
        prompts = ([20 + n % 29, 5 + n // 29 % 37, 6 + n // 1073] for n in range(count))
        lines = (json.dumps({"id": str(n), "token_ids": prompt}) for n, prompt in enumerate(prompts))
        samples.write_text("\n".join(lines))
        source = {"kind": "file", "path": str(samples)}
        return self.shop.submit(request(target, (), source=source, loss="all", **changes))

    def wait(self, happened: Callable[[Store], object]) -> None:
        """Wait until something can be read."""
        asyncio.run(until(lambda: bool(happened(self.shop.store)), patience_s=PATIENCE_S, poll_s=0.1))

    def ends(self, job_id: str, state: JobState) -> JobRow:
        """Wait until a job has ended in `state`, and return it."""
        self.wait(lambda store: store.read(jobs.state, job_id) in ENDED)
        job = self.shop.store.read(jobs.job, job_id)
        assert job.state is state, job.problem
        return job


@contextmanager
def running(settings: Settings, log: Path) -> Iterator[WorkerProcess]:
    with log.open("wb") as output:
        worker = WorkerProcess(worker_command(), settings.with_secrets(), output)
        try:
            yield worker
            assert worker.exit_code() is None, log.read_text()[-4000:]
        finally:
            worker.kill()
            asyncio.run(until(lambda: worker.exit_code() is not None))


@pytest.fixture
def cluster(tmp_path: Path, postgres: Postgres) -> Iterator[Callable[..., Cluster]]:
    with ExitStack() as opened:

        def opening(target: Path, **settings: object) -> Cluster:
            url = opened.enter_context(postgres.database())
            roots = {"source_roots": (tmp_path,), "database_url": url, "poll_s": 0.1}
            shop = Shop.open(tmp_path, target, **roots, **settings)
            opened.callback(shop.store.close)
            return Cluster(shop, tmp_path, opened.enter_context(ExitStack()))

        yield opening


@pytest.mark.slow
@pytest.mark.parametrize("dies", [pytest.param("start", marks=pytest.mark.long), "step"])
def test_a_sick_node_rests_and_every_row_is_captured_once(
    cluster: Callable[..., Cluster], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies: str
) -> None:
    """1. Two workers share a job. 2. The engine of one dies until it rests, and says so. 3. The other one
    captures it all."""
    monkeypatch.setenv(DIES, dies)
    target = random_target(tmp_path / "models" / "target", hidden=64, max_position=512)
    nodes = cluster(target, engine_rest_s=720.0, unit_max_samples=NUM_SAMPLES // 120)
    for engine in ("tests.support.fake_engine:FakeEngine", "tests.support.dying_engine:DyingEngine"):
        nodes.worker(engine)
    nodes.wait(lambda store: len(store.read(workers.present)) == 2)
    job_id = nodes.submit(target, NUM_SAMPLES)
    nodes.wait(lambda store: store.read(workers.sick, resting=True))
    assert nodes.shop.store.read(jobs.job, job_id).waits == f"{SAYS}: the device is gone"
    nodes.ends(job_id, JobState.COMPLETED)
    assert_whole(nodes.shop, job_id, written=NUM_SAMPLES, rejected=0)
    assert {row.attempts for row in nodes.shop.store.read(units.of_job, job_id)} == {1}
    (sickness,) = nodes.shop.store.read(workers.sick)
    assert sickness.deaths >= len(PAUSES)


@pytest.mark.engine
@pytest.mark.long
@pytest.mark.parametrize("dies", ["start", "step"])
def test_on_vllm_a_sick_node_blocks_its_job_alone_and_fails_nobodys(
    cluster: Callable[..., Cluster], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies: str
) -> None:
    """1. The only worker's engine core dies: it blocks the job with the cause, and rests. 2. Another worker
    comes, and the job is resumed. 3. The sick one probes once more. 4. The other one captures every row."""
    monkeypatch.setenv(DIES, dies)
    target = random_target(tmp_path / "models" / "target", hidden=64, layers=8)
    options = {"enforce_eager": True, "compilation_config": {"custom_ops": ["none"]}}
    nodes = cluster(
        target, engine_rest_s=360.0, unit_max_samples=10, engine_options=options, cpu_kv_cache_gib=1
    )
    nodes.worker("tests.support.dying_connector:DyingVllm")
    job_id = nodes.submit(target, NUM_ON_VLLM, dtype="float32", layers=[1, 2])
    problem = nodes.ends(job_id, JobState.BLOCKED).problem
    assert problem is not None and problem.detail.startswith(f"{SAYS}, and no other worker takes the model: ")
    nodes.worker(VLLM)
    nodes.wait(lambda store: len(store.read(workers.present)) == 2)
    nodes.shop.store.write(jobs.resume, job_id)
    nodes.ends(job_id, JobState.COMPLETED)
    assert {row.attempts for row in nodes.shop.store.read(units.of_job, job_id)} == {1}
    (sickness,) = nodes.shop.store.read(workers.sick)
    assert sickness.deaths == len(PAUSES) + 1
    print(f"the sick worker said: {sickness.problem.detail}")
    rows = stored_rows(nodes.shop.settings.dataset_dir(job_id), job_id, (1, 2, 8))
    assert len(rows) == NUM_ON_VLLM == len(nodes.shop.rows(job_id))
    assert_states(rows, target)
