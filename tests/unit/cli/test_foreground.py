"""What `quarry extract` shows and answers while it waits for its worker."""

import io
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from schemas.job import JobState
from service.cli import foreground
from service.cli.progress_bar import Lines
from service.errors import StoreUnavailable
from service.settings import Settings
from service.store import Store, jobs, migration
from service.work.worker_process import STOP_MARGIN_S
from tests.support.store_cases import job_id, reach


def test_a_database_that_is_away_for_a_while_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. The worker runs. 2. The job cannot be read for a while. 3. The run ends as its job did."""
    settings = Settings(data_dir=tmp_path)
    store = Store(settings.database())
    store.write(migration.migrate)
    reach(store, JobState.COMPLETED)
    healthy, away = Store.read, iter([True, True])

    def read(self: Store, *verb: Any, **named: Any) -> Any:
        if next(away, False):
            raise StoreUnavailable("away")
        return healthy(self, *verb, **named)

    monkeypatch.setattr(Store, "read", read)
    monkeypatch.setattr(foreground, "POLL_S", 0.05)
    monkeypatch.setattr(
        foreground, "worker_command", lambda *_: [sys.executable, "-c", "import time; time.sleep(0.5)"]
    )
    stream = io.StringIO()
    assert foreground._run(store, job_id(1), settings, Lines(stream)).completed
    assert "completed" in stream.getvalue()
    assert store.read(jobs.state, job_id(1)) is JobState.COMPLETED
    store.close()


def test_a_run_that_is_stopped_says_once_how_long_that_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = Settings(data_dir=tmp_path, drain_s=7)
    store = Store(settings.database())
    store.write(migration.migrate)
    reach(store, JobState.RUNNING)
    child = "import signal, time; signal.signal(15, lambda *_: time.sleep(1) or exit()); time.sleep(60)"
    monkeypatch.setattr(foreground, "POLL_S", 0.05)
    monkeypatch.setattr(foreground, "worker_command", lambda *_: [sys.executable, "-c", child])
    for after_s in (1.0, 1.3):
        threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGINT)).start()
    assert foreground._run(store, job_id(1), settings, Lines(io.StringIO())).signal == signal.SIGINT
    (said,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("stopping")]
    assert said == f"stopping: what the engine holds is finished first, in {7 + STOP_MARGIN_S:.0f} s at most"
    store.close()
