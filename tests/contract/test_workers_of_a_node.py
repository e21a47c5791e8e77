"""`--workers`: several worker processes of a node share the jobs, and end with the one that started them."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from schemas.job import JobState
from service.client import Quarry
from service.store import Store, jobs, units
from tests.support.children import wait_for_end, workers_of
from tests.support.jobs import FAKE_ENGINE, Shop, conversations, request
from tests.support.service_process import QUARRY, ROOT, serving
from tests.support.tiny_model import random_target

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_target(tmp_path_factory.mktemp("target") / "model", layers=4, hidden=64)


def test_a_service_runs_its_workers_and_ends_in_order_with_them(tmp_path: Path, target: Path) -> None:
    """1. Two workers start. 2. A job is done. 3. One is killed and started again. 4. SIGTERM ends all."""
    with serving(tmp_path / "data", "--workers", "2") as service:
        job_id = service.post(target)
        with Quarry(service.url) as quarry:
            *_, last = quarry.follow(job_id)
        assert last.state is JobState.COMPLETED, last.problem
        workers = workers_of(service.process.pid)
        assert len(workers) == 2
        os.kill(workers[0], signal.SIGKILL)
        wait_for_end(workers[0])
        service.process.send_signal(signal.SIGTERM)
        assert service.process.wait(120) == 0
        for worker in workers:
            wait_for_end(worker)


def test_a_service_says_of_a_worker_that_it_cannot_live_and_the_other_runs_the_jobs(
    tmp_path: Path, target: Path
) -> None:
    """1. The worker of one GPU dies at every start. 2. `GET /readyz` counts it. 3. The other does a job."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\n"
        "if 'worker' in sys.orig_argv and os.environ['CUDA_VISIBLE_DEVICES'] == '0':\n    os._exit(9)\n"
        "from service.work import supervisor\nsupervisor.FIRST_DELAY_S = 0.01\n"
    )
    options = {"python_path": f"{tmp_path}:{ROOT}", "CUDA_VISIBLE_DEVICES": "0,1"}
    with serving(tmp_path / "data", "--workers", "2", **options) as service, Quarry(service.url) as quarry:
        while quarry.readiness().workers_lost != 1:
            time.sleep(0.05)
        *_, last = quarry.follow(service.post(target))
        assert last.state is JobState.COMPLETED, last.problem
        service.process.send_signal(signal.SIGTERM)
        assert service.process.wait(120) == 0


@pytest.mark.slow
def test_workers_until_idle_share_a_job_and_end_when_it_is_done(tmp_path: Path, target: Path) -> None:
    shop = Shop.open(tmp_path, target, engine=FAKE_ENGINE, unit_max_samples=2)
    job_id = shop.submit(request(target, conversations(40), loss="all", layers=[1, 2]))
    shop.store.close()
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "QUARRY_ENGINE": FAKE_ENGINE,
        "QUARRY_MODEL_ROOTS": '["/"]',
        "QUARRY_POLL_S": "0.05",
        "QUARRY_UNIT_MAX_SAMPLES": "2",
    }
    command = [*QUARRY, "worker", "--data-dir", str(shop.settings.data_dir), "--workers", "2", "--until-idle"]
    done = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stderr
    store = Store(shop.settings.database())
    job = store.read(jobs.job, job_id)
    assert job.state is JobState.COMPLETED, job.problem
    assert {row.attempts for row in store.read(units.of_job, job_id)} == {1}
    store.close()


def test_a_number_of_workers_that_cannot_be_is_a_usage_error(tmp_path: Path) -> None:
    command = [*QUARRY, "serve", "--data-dir", str(tmp_path / "data"), "--port", "0", "--workers", "many"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "QUARRY_ENGINE": FAKE_ENGINE}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, "'many' is not a number of workers" in done.stderr) == (2, True), done.stderr


@pytest.mark.parametrize(("arguments", "code"), [((), 0), (("--until-idle",), 143)])
def test_a_signal_while_the_workers_start_is_an_end_in_order(
    tmp_path: Path, arguments: tuple[str, ...], code: int
) -> None:
    command = [*QUARRY, "worker", "--data-dir", str(tmp_path / "data"), "--workers", "2", *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "QUARRY_ENGINE": FAKE_ENGINE}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as node:
        assert node.stderr is not None
        lines = iter(node.stderr.readline, "")
        assert sum(next(lines).rstrip().endswith("started") for _ in range(2)) == 2
        node.send_signal(signal.SIGTERM)
        node.stderr.read()
        assert node.wait(120) == code


BEFORE_UVICORN = """
import os, signal, sys
from pathlib import Path
from service.api import serve
from service.plan.child.fork_server import FORK_SERVER
from service.settings import Settings
FORK_SERVER.warm = lambda: os.kill(os.getpid(), signal.SIGTERM)
settings = Settings(data_dir=Path(sys.argv[1]), port=0)
sys.exit(serve.serve(settings, serve.bound(settings), []))
"""


def test_a_signal_between_the_port_and_uvicorn_ends_the_service(tmp_path: Path) -> None:
    command = [sys.executable, "-c", BEFORE_UVICORN, str(tmp_path / "data")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
