"""`quarry serve` as an operator runs it: a process that takes jobs, runs them, and ends in order."""

import asyncio
import os
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import pytest

from schemas.job import JobState
from service.api.serve import EXIT_WORKER_LOST, bound
from service.capture.engine import Answer, Prompt
from service.cli import main
from service.client import Quarry
from service.errors import OptionRefused
from service.host import check_data_dir
from service.proof.verify import verify_dataset
from service.settings import Settings
from service.store import Store, TaskState, units
from tests.support.children import children_of, wait_for_end, workers_of
from tests.support.fake_engine import FakeEngine
from tests.support.service_process import QUARRY, ROOT, SAMPLES, body_of, serving
from tests.support.tiny_model import random_target


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_target(tmp_path_factory.mktemp("target") / "model", layers=4, hidden=64)


@pytest.mark.slow
def test_a_service_without_a_worker_keeps_its_port_and_ends_in_order(tmp_path: Path):
    """1. A service runs. 2. Another on its port ends by an error, before it has a worker. 3. Ctrl-C."""
    with serving(tmp_path / "data", "--no-worker") as service:
        assert workers_of(service.process.pid) == []
        port = service.url.rpartition(":")[2]
        command = [*QUARRY, "serve", "--data-dir", str(tmp_path / "b"), "--port", port]
        second = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
        assert second.returncode == 1
        what = f"the service cannot listen at 127.0.0.1, port {port}: Address already in use"
        assert second.stderr.splitlines() == [
            f"error: The option cannot be honoured: {what}",
            "  field: port",
            "  cure:  end what listens there, or give another --port or QUARRY_PORT",
        ]
        assert not (tmp_path / "b").exists()
        service.process.send_signal(signal.SIGINT)
        assert service.process.wait(60) == 0


@pytest.mark.parametrize("host", ["192.0.2.1", "2001:db8::1", "no-such-host.invalid"])
def test_a_host_that_is_not_this_machine_is_named(host: str):
    with pytest.raises(OptionRefused, match="cannot listen") as refused:
        bound(Settings(host=host, port=0))
    assert refused.value.field == "host" and "QUARRY_HOST" in str(refused.value.cure)


def test_a_service_runs_a_job_and_ends_in_order_with_its_worker(tmp_path: Path, target: Path):
    """1. A job is posted and followed to its end. 2. Its dataset is right. 3. SIGTERM ends both processes.

    No process that the service starts has its secrets in the environment, and nobody else may read its files.
    """
    with serving(tmp_path / "data", QUARRY_HUB_TOKEN="hf_secret") as service:
        job_id = service.post(target)
        with Quarry(service.url) as quarry:
            *_, last = quarry.follow(job_id)
            manifest = quarry.manifest(job_id)
        assert last.state is JobState.COMPLETED, last.problem
        assert manifest.totals.samples_written == len(SAMPLES)
        started = [service.worker, *children_of(service.worker)]
        assert len(started) > 1
        assert not any(b"hf_secret" in Path(f"/proc/{pid}/environ").read_bytes() for pid in started)
        service.process.send_signal(signal.SIGTERM)
        assert service.process.wait(120) == 0
        wait_for_end(service.worker)
    report = verify_dataset(tmp_path / "data" / "jobs" / job_id)
    assert report.ok, report.findings
    files = [path for path in (tmp_path / "data").rglob("*") if path.is_file()]
    assert {path.name for path in files} > {"quarry.db", f"{job_id}.json"}
    assert [path for path in files if path.stat().st_mode & 0o077] == []


@pytest.mark.slow
def test_estimates_that_come_at_once_to_a_new_service_are_all_answered(tmp_path: Path, target: Path):
    """The first of them imports transformers; two threads that did so at once saw halves of it."""
    with (
        serving(tmp_path / "data", "--no-worker", QUARRY_ESTIMATES_AT_ONCE="8") as service,
        ThreadPoolExecutor(8) as callers,
    ):
        posts = [
            callers.submit(
                httpx2.post, f"{service.url}/estimate", json=body_of(target), trust_env=False, timeout=120
            )
            for _ in range(8)
        ]
        answers = [post.result() for post in posts]
    assert [answer.status_code for answer in answers] == [200] * 8, [answer.text for answer in answers]


@pytest.mark.slow
def test_a_killed_worker_is_replaced_and_the_job_completes(tmp_path: Path, target: Path):
    """1. A job is in the engine. 2. The worker is killed. 3. Another takes over after the lease."""
    with serving(tmp_path / "data", QUARRY_FAKE_STEP_S="2", QUARRY_LEASE_S="1") as service:
        with Quarry(service.url) as quarry:
            looks = quarry.follow(service.post(target))
            assert any(job.progress.units_planned for job in looks)
            os.kill(service.worker, signal.SIGKILL)
            *_, last = looks
        assert last.state is JobState.COMPLETED, last.problem
        assert last.progress.samples_written == len(SAMPLES)
        assert service.worker not in children_of(service.process.pid)


class Held(FakeEngine):
    """Says that it has a row, and never answers."""

    async def run(self, prompt: Prompt) -> Answer:
        Path(os.environ["HELD"]).touch()
        await asyncio.Event().wait()
        raise AssertionError


@pytest.mark.slow
def test_a_killed_service_takes_its_worker_with_it_which_gives_its_units_back(tmp_path: Path, target: Path):
    held = tmp_path / "held"
    environment = {"QUARRY_ENGINE": f"{__name__}:Held", "HELD": str(held), "QUARRY_DRAIN_S": "1e6"}
    with serving(tmp_path / "data", **environment) as service:
        job_id = service.post(target)
        while not held.exists():
            time.sleep(0.05)
        service.process.kill()
        service.process.wait()
        wait_for_end(service.worker)
    store = Store(Settings(data_dir=tmp_path / "data").database())
    (unit,) = store.read(units.of_job, job_id)
    store.close()
    assert (unit.state, unit.epoch, unit.attempts, unit.deaths) == (TaskState.PENDING, 1, 0, 0)


@pytest.mark.slow
def test_a_service_whose_worker_cannot_live_ends_with_a_code_of_its_own(tmp_path: Path):
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "sitecustomize.py").write_text(
        "import os, sys\nif 'worker' in sys.orig_argv:\n    os._exit(9)\n"
        "from service.work import supervisor\nsupervisor.FIRST_DELAY_S = 0.01\n"
    )
    with serving(tmp_path / "data", python_path=f"{broken}:{ROOT}") as service:
        assert service.process.wait(240) == EXIT_WORKER_LOST


@pytest.mark.slow
def test_a_service_that_starts_without_its_database_waits_for_it(tmp_path: Path):
    """1. A folder is where the database's file should be. 2. It goes away. 3. The service serves."""
    blocked = tmp_path / "data" / "quarry.db"
    blocked.mkdir(parents=True)

    def unblock(line: str) -> None:
        if "waiting for the database" in line and blocked.is_dir():
            blocked.rmdir()

    with serving(tmp_path / "data", "--no-worker", on_line=unblock):
        assert blocked.is_file()


def test_a_database_that_cannot_be_used_is_named_without_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("QUARRY_DATABASE_URL", "mysql://host/name")
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--data-dir", str(tmp_path), "--port", "0"])
    assert ended.value.code == 2
    assert "field: database_url" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["serve", "--port", "0", "--no-worker"], ["worker", "--until-idle"]])
@pytest.mark.parametrize("place", ["data", "data/quarry.db"])
def test_a_data_folder_of_another_user_is_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: list[str],
    place: str,
):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "quarry.db").touch()
    # The superuser, as whom tests may run, may write everywhere.
    monkeypatch.setattr(os, "access", lambda path, _: Path(path) != tmp_path / place)
    monkeypatch.setenv("QUARRY_DATA_DIR", str(tmp_path / "data"))
    with pytest.raises(SystemExit) as ended:
        main(command)
    assert ended.value.code == 2
    assert f"{tmp_path / place} cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "url"),
    [("quarry.db-2026-11-29.gz", None), ("quarry.db", "postgresql+psycopg://quarry@host/quarry")],
)
def test_what_is_not_the_database_need_not_be_writable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, url: str | None
):
    """A backup beside it, and the SQLite database that was there before PostgreSQL."""
    (tmp_path / name).touch()
    monkeypatch.setattr(os, "access", lambda path, _: Path(path) != tmp_path / name)
    check_data_dir(Settings(data_dir=tmp_path, database_url=url))


@pytest.mark.slow
def test_beyond_the_loopback_it_does_not_start_without_a_key(tmp_path: Path):
    command = [*QUARRY, "serve", "--data-dir", str(tmp_path / "data"), "--host", "0.0.0.0", "--port", "0"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert "QUARRY_ADMIN_KEY_FILE" in ended.stderr
