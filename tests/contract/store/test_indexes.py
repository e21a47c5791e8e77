"""What is asked at every turn is found by an index, however many jobs, tasks and runs there are."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event
from sqlalchemy.engine import Engine

from service.store import (
    Store,
    backlog,
    captured_samples,
    deletion,
    hosts,
    migration,
    plans,
    publishing,
    runs,
    units,
    webhooks,
)
from tests.support.store_cases import job_id

JOB = job_id(1)
OF_JOB = "task_by_state (job_id=? AND kind=? AND state=?)"
QUESTIONS: dict[str, tuple[Callable[[Store], object], str]] = {
    "the next plan": (lambda store: plans.lease(store, "anybody", 60.0), OF_JOB),
    "the owners of plans": (lambda store: plans.lease(store, "anybody", 60.0), "task_by_subject (kind=?)"),
    "the next unit": (lambda store: units.lease(store, "anybody", 60.0), OF_JOB),
    "the next deletion": (lambda store: deletion.lease(store, "anybody", 60.0), OF_JOB),
    "the next report": (lambda store: webhooks.lease(store, "anybody", 60.0), "open_webhook"),
    "the next dataset": (lambda store: publishing.lease(store, "anybody", 60.0), OF_JOB),
    "a repository's publisher": (lambda store: publishing.lease(store, "anybody", 60.0), "task_by_subject ("),
    "a job's run": (
        lambda store: store.write(runs.note, JOB, "a remark"),
        "run_by_job (job_id=?)",
    ),
    "a schedule's first recipe": (
        lambda store: store.read(captured_samples.first_recipe, JOB),
        "captured_sample_by_job (schedule=? AND job_id=?)",
    ),
    "a run's keys": (
        lambda store: store.read(captured_samples.hashes, 1, "recipe", JOB),
        "captured_sample_by_job (schedule=? AND job_id=? AND recipe=?)",
    ),
    "jobs that wait": (lambda store: store.read(backlog.runnable), OF_JOB),
    "the oldest leases": (
        lambda store: store.read(backlog.leased),
        "SCAN task USING INDEX task_by_subject",
    ),
    "what is not stored": (
        lambda store: store.read(hosts.views),
        "SEARCH unit_commit USING INDEX unit_to_store (job_id=?)",
    ),
    "a schedule's last good run": (
        lambda store: store.read(runs.last_good_at, 1),
        "run_1 (schedule=?)",
    ),
}


@pytest.mark.parametrize(("ask", "index"), QUESTIONS.values(), ids=QUESTIONS)
def test_an_index_finds_it(tmp_path: Path, ask: Callable[[Store], object], index: str) -> None:
    store = Store(f"sqlite:///{tmp_path / 'quarry.db'}")
    store.write(migration.migrate)
    asked: list[tuple[str, Any]] = []

    def note(connection: Any, cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        asked.append((statement, parameters))

    event.listen(Engine, "before_cursor_execute", note)
    try:
        ask(store)
    finally:
        event.remove(Engine, "before_cursor_execute", note)
    statements = [one for one in asked if one[0].startswith(("SELECT", "UPDATE", "DELETE"))]
    with store.reading() as tx:
        ways = [
            row.detail
            for statement, parameters in statements
            for row in tx.connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters)
        ]
    store.close()
    assert any(index in way for way in ways), ways
