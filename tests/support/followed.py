"""A job that tests capture unit by unit while they follow it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2

from schemas.job import JobState
from service.reader import QuarryFollower, QuarryStream
from service.settings import Settings
from service.store import Store, jobs
from tests.support.finished_job import JOB, capture_unit
from tests.support.roles import run_publishing

UNITS, ROWS = 5, 3
ELSEWHERE = "/not/on/this/host"
EVERY = [f"{JOB}-{unit}-{row}" for unit in range(UNITS) for row in range(ROWS)]


def ids(rows: Any) -> list[str]:
    return [row.sample_id for row in rows]


@dataclass
class Followed:
    """A job of a service, captured unit by unit as a test asks for it."""

    settings: Settings
    store: Store
    api: httpx2.Client

    @property
    def url(self) -> str:
        return str(self.api.base_url)

    @property
    def dataset(self) -> Path:
        return self.settings.dataset_dir(JOB)

    def capture(self, num_units: int = 1) -> None:
        for _ in range(num_units):
            capture_unit(self.store, self.dataset, ROWS)

    def complete(self) -> None:
        while run_publishing(self.store, self.settings, "publisher", lambda: False):
            pass
        assert self.store.read(jobs.state, JOB) is JobState.COMPLETED

    def follow(self, **changes: Any) -> QuarryFollower:
        return QuarryStream.follow(self.url, JOB, **({"rank": 0, "world_size": 1} | changes))
