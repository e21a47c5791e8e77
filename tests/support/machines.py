"""Machines that capture and store without the data folder."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from schemas.job import JobState, Progress
from schemas.worker import Role
from service import host
from service.settings import Settings
from service.store import Store, commits, jobs, storing
from tests.support.desk import REPO, writable_hub
from tests.support.fake_hub import FakeHub
from tests.support.jobs import Shop
from tests.support.roles import Capture, run_storing

AWAY = (Role.CAPTURE, Role.STORE)


@contextmanager
def hub_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """Run a Hub to which units are stored without a wait between commits."""
    monkeypatch.setattr(storing, "APART", timedelta(0))
    monkeypatch.setattr(storing, "LATEST", timedelta(0))
    with writable_hub(tmp_path, monkeypatch) as hub:
        yield hub


class Machine:
    """One with a folder, a database's URL and a token, and nothing else."""

    def __init__(self, shop: Shop, folder: Path, **changes: Any) -> None:
        there = {"data_dir": folder, "roles": AWAY, "database_url": shop.settings.database()}
        there |= {"units_in_flight": 1, "units_in_proof": 0}
        self.settings = Settings.model_validate(dict(shop.settings) | there | changes)
        self.store = Store(self.settings.database())
        self.number = host.host_of(self.store, self.settings)
        self.id = (folder / host.HOST_FILE).read_text()

    def capture(self, job_id: str, *, units_done: int | None = None) -> None:
        """Capture all, or until a number of units are done."""

        async def some() -> None:
            loop = Capture(self.store, self.settings, f"on-{self.number}", only_job=job_id)
            running = asyncio.create_task(loop.run())
            while not running.done():
                await asyncio.sleep(0.01)
                if units_done and self.store.read(jobs.job, job_id).progress.units_done >= units_done:
                    loop.stop_at_once()
            await running

        asyncio.run(asyncio.wait_for(some(), 120))

    def keep(self) -> bool:
        return run_storing(self.store, self.settings, f"storer-{self.number}", lambda: False)

    def files(self) -> set[str]:
        return {path.name for path in (self.settings.data_dir / "work").rglob("*.parquet")}


def is_whole(shop: Shop, hub: FakeHub, job_id: str) -> Progress:
    """Every planned sample is in the repository, once."""
    job = shop.store.read(jobs.job, job_id)
    assert job.state is JobState.COMPLETED, job.problem
    progress = job.progress
    assert (progress.units_done, progress.units_stored) == (progress.units_planned, progress.units_planned)
    assert progress.samples_written + progress.samples_rejected == progress.samples_planned
    there = hub.repo(REPO).head.tree
    made = shop.store.read(commits.unit_commits, job_id)
    named = {entry.path: entry.sha256 for unit in made for entry in unit.files}
    assert {path: there[path].etag for path in named} == named
    assert {path for path in there if path.startswith(("data/", "index/"))} == set(named)
    return progress
