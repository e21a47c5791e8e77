"""What `quarry extract` shows and answers while it waits for its worker."""

import io
import sys
from pathlib import Path
from typing import Any

import pytest

from schemas.job import JobState
from service.cli import foreground
from service.cli.progress_bar import Lines
from service.errors import StoreUnavailable
from service.settings import Settings
from service.store import Store, jobs, migration
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
