"""kill -9 of the worker in the middle of a job.

After a restart the job completes, every sample exactly once.

The worker runs as it is deployed, in a process of its own with its planner, publisher and engine. The short
forms run the fake engine; the long form runs vLLM, with 2,000 samples in `make crash-all`.
"""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from schemas.job import JobState
from service.proof.verify import verify_dataset
from service.settings import Settings
from service.store import jobs
from tests.crash.conftest import MODE
from tests.support.children import settings_environment
from tests.support.jobs import ENDED, Shop, conversations, request
from tests.support.tiny_model import random_target
from tests.support.waiting import wait_until

PATIENCE_S = 120.0


class Worker:
    """A worker process in a session of its own, so that what it leaves behind can be counted."""

    def __init__(self, settings: Settings, log: Path, *, fake_step_s: float) -> None:
        environment = settings_environment(settings, os.environ) | {"QUARRY_FAKE_STEP_S": str(fake_step_s)}
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "service.cli", "worker"],
                env=environment,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def kill(self) -> None:
        """Kill the worker alone, and wait until everything that it had started is gone by itself."""
        self._process.kill()
        self._process.wait()
        deadline = time.monotonic() + PATIENCE_S
        while left := alive(self._process.pid):
            assert time.monotonic() < deadline, f"the dead worker's children did not end: {left}"
            time.sleep(0.02)

    def stop(self) -> int:
        """Ask it to drain and return its exit status."""
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(PATIENCE_S)


def alive(group: int) -> list[str]:
    """Return the states and command lines of a group's processes that run (a zombie does not)."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rsplit(") ", 1)[1].split()
            if int(fields[2]) == group and fields[0] != "Z":
                command = status.with_name("cmdline").read_bytes().replace(b"\0", b" ").decode()
                found.append(f"{fields[0]} {command}")
        except OSError:  # it ended while we looked
            continue
    return found


def survive(shop: Shop, job_id: str, log: Path, kills: int, *, fake_step_s: float, patience_s: float) -> None:
    """Kill the worker `kills` times at random points of the job, then let it end."""
    draw = random.Random(7)
    for kill in range(kills):
        worker = Worker(shop.settings, log, fake_step_s=fake_step_s)
        before = shop.store.read(jobs.job, job_id).progress.units_done
        # Each kill comes after at least one more unit, so that every round makes progress and loses work.
        wait_until(
            lambda before=before: (
                shop.store.read(jobs.job, job_id).progress.units_done > before
                or shop.store.read(jobs.job, job_id).state in ENDED
            ),
            f"no unit was committed before kill {kill}",
            patience_s=patience_s,
        )
        time.sleep(draw.random() * 0.3)
        worker.kill()
        assert shop.store.read(jobs.job, job_id).state is not JobState.FAILED
    worker = Worker(shop.settings, log, fake_step_s=fake_step_s)
    wait_until(
        lambda: shop.store.read(jobs.job, job_id).state in ENDED, "the job did not end", patience_s=patience_s
    )
    assert worker.stop() == 0


def assert_every_sample_once(shop: Shop, job_id: str, count: int) -> None:
    job = shop.store.read(jobs.job, job_id)
    assert job.state is JobState.COMPLETED, job.problem
    rows = shop.rows(job_id)
    assert sorted(row["source_id"] for row in rows) == sorted(f"c{number}" for number in range(count))
    report = verify_dataset(shop.settings.dataset_dir(job_id), model_folder=Path(job.model))
    assert report.ok, report.findings


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return random_target(tmp_path / "models" / "target", hidden=64, max_position=1024)


@pytest.mark.crash
def test_kills_in_the_middle_of_a_job_lose_and_double_nothing(tmp_path, target):
    shop = Shop.open(tmp_path, target, lease_s=1.0)
    job_id = shop.submit(request(target, conversations(150), storage={"shard_bytes": 131_072}))
    survive(shop, job_id, tmp_path / "log", kills=2, fake_step_s=0.02, patience_s=PATIENCE_S)
    assert_every_sample_once(shop, job_id, 150)
    shop.store.close()


@pytest.mark.crash
@pytest.mark.engine
@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("worker_apart")
def test_kills_under_vllm_lose_and_double_nothing(tmp_path, target):
    num_samples = 2000 if MODE == "all" else 300
    shop = Shop.open(
        tmp_path,
        target,
        lease_s=5.0,
        engine="service.capture.vllm_engine:VllmEngine",
        engine_options={"enforce_eager": True},
        pool_bytes=2**24,
    )
    body = request(target, conversations(num_samples), storage={"shard_bytes": 4_194_304}, canary="run")
    job_id = shop.submit(body)
    survive(shop, job_id, tmp_path / "log", kills=2, fake_step_s=0.0, patience_s=1200.0)
    assert_every_sample_once(shop, job_id, num_samples)
    shop.store.close()
