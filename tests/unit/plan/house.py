"""What tests of planning share: a data folder, a target, a source and a store."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa

from schemas.job import JobSummary
from schemas.request import ExtractRequest
from service.settings import Settings
from service.store import NewJob, Store, UnitRow, jobs, migration, units
from tests.support import templates
from tests.support.roles import run_planning
from tests.support.store_cases import Clock, job_id
from tests.support.stored_plans import plan_content, plan_table

JOB = job_id(1)
BYTES_PER_TOKEN = 2 * 64 * 2
"""Two layers of 64 bfloat16 values."""


def chat(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": "yes"}]


class House:
    """A data folder, a target, a source of twelve conversations of which three are bad, and a store."""

    def __init__(self, root: Path, clock: Clock) -> None:
        self.root = root
        self.clock = clock
        self.model = templates.write_target(root / "model")
        self.source = root / "rows.jsonl"
        self.write_rows(12)
        self.settings = Settings(
            data_dir=root / "data", model_roots=(root,), source_roots=(root,), unit_max_samples=4
        )
        self.settings.data_dir.mkdir()
        self.store = Store(self.settings.database(), clock.of(self.settings.database()))
        self.store.write(migration.migrate)

    def write_rows(self, num: int, word: str = "row") -> None:
        rows = [{"messages": chat(f"{word} {i}")} if i % 4 != 3 else {"id": f"bad-{i}"} for i in range(num)]
        self.source.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def submit(self, **options: Any) -> None:
        source = {"kind": "file", "path": str(self.source)}
        body = {"model": str(self.model), "layers": [2], "source": source} | options
        self.store.write(jobs.submit, NewJob.of(JOB, "key", ExtractRequest.model_validate(body)))

    def job(self) -> JobSummary:
        return self.store.read(jobs.job, JOB)

    def units(self) -> list[UnitRow]:
        return self.store.read(units.of_job, JOB)

    def plan(self, stop: Callable[[], bool] = lambda: False, owner: str = "planner") -> bool:
        return run_planning(self.store, self.settings, owner, stop)

    def plan_later(self, owner: str = "second") -> JobSummary:
        """Plan when the lease of the planner before has run out; return the job."""
        self.clock.advance(self.settings.lease_s + 1)
        assert self.plan(owner=owner)
        return self.job()

    def plan_content(self, unit: int) -> bytes:
        return plan_content(self.store, JOB, unit)

    def plan_table(self, unit: int) -> pa.Table:
        return plan_table(self.store, JOB, unit)
