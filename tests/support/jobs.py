"""Whole jobs on the fake engine, driven in this process: plan, capture, publish, each to its end."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from schemas.job import JobState
from schemas.names import job_id_from_content
from schemas.request import ExtractRequest
from service.settings import Settings
from service.store import JobRow, NewJob, Store, jobs, migration
from tests.support.roles import Capture, run_planning, run_publishing

FAKE_ENGINE = "tests.support.fake_engine:FakeEngine"
ENDED = {JobState.COMPLETED, JobState.FAILED, JobState.BLOCKED, JobState.CANCELLED}


def conversations(count: int, *, longest: int = 60, asked_last: str = "") -> list[dict[str, Any]]:
    """Return inline samples of mixed lengths, each different; they may end with a question to the target."""
    last = [{"role": "user", "content": asked_last}] if asked_last else []
    return [
        {
            "id": f"c{number}",
            "messages": [
                {"role": "user", "content": f"Question {number}: what is in module {number * 7 % 101}?"},
                {
                    "role": "assistant",
                    "content": f"Answer {number}. " + "It holds things. " * (number * 13 % longest),
                },
                *last,
            ],
        }
        for number in range(count)
    ]


def request(target: Path, samples: Sequence[dict[str, Any]], **changes: Any) -> ExtractRequest:
    """Return a request for inline samples with small shards."""
    body: dict[str, Any] = {
        "model": str(target),
        "source": {"kind": "inline", "samples": list(samples)},
        "storage": {"shard_bytes": 262_144},
        "canary": "skip",
    }
    return ExtractRequest.model_validate(body | changes)


@dataclass
class Shop:
    """A store and settings of one test, and the three roles run by hand."""

    settings: Settings
    store: Store
    patience_s: float = 120.0
    """How long a capture may take before it counts as stuck."""

    @classmethod
    def open(cls, folder: Path, target: Path, **settings: Any) -> "Shop":
        """Make a fresh service in `folder` that may load `target`."""
        values: dict[str, Any] = {
            "data_dir": folder / "data",
            "model_roots": (target.parent,),
            "engine": FAKE_ENGINE,
            "pool_bytes": 2**20,
            "poll_s": 0.1,  # a worker that looks 50 times a second takes a third of a core
        }
        told = Settings(**(values | settings))
        told.data_dir.mkdir(parents=True, exist_ok=True)
        store = Store(told.database())
        store.write(migration.migrate)
        return cls(told, store)

    def submit(self, body: ExtractRequest, key: str = "a job") -> str:
        """Submit a job and return its id."""
        return self.store.write(jobs.submit, NewJob.of(job_id_from_content(key), key, body))[0].id

    def plan(self) -> None:
        """Plan everything that waits for it."""
        while run_planning(self.store, self.settings, "planner", lambda: False):
            pass

    def capture(self, job_id: str, *, owner: str = "worker") -> None:
        """Capture until the job needs no more of it."""
        loop = Capture(self.store, self.settings, owner, only_job=job_id)
        asyncio.run(asyncio.wait_for(loop.run(), self.patience_s))

    def publish(self) -> None:
        """Publish everything that is ready."""
        while run_publishing(self.store, self.settings, "publisher", lambda: False):
            pass

    def run(self, body: ExtractRequest, key: str = "a job") -> JobRow:
        """Run one job through all three roles and return how it ended."""
        job_id = self.submit(body, key)
        return self.finish(job_id)

    def finish(self, job_id: str) -> JobRow:
        """Run a job from where it stands to its end."""
        self.plan()
        if self.store.read(jobs.job, job_id).state not in ENDED:
            self.capture(job_id)
            self.publish()
        return self.store.read(jobs.job, job_id)

    def rows(self, job_id: str) -> list[dict[str, Any]]:
        """Return every stored row of a job's dataset."""
        folder = self.settings.dataset_dir(job_id) / "data" / job_id
        return [row for shard in sorted(folder.glob("*.parquet")) for row in pq.read_table(shard).to_pylist()]
