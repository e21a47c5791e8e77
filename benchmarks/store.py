"""What the database answers where there is much in it: `python -m benchmarks.store [JOBS] [TASKS_A_JOB]`.

Prints a JSON object for each database: the milliseconds of each query, the median of several. Run it from two
trees by turns to compare them.
"""

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from sqlalchemy import insert, text

from schemas.job import JobState
from schemas.schedule import NewSchedule
from service.api.metrics import JobMetrics
from service.store import NewJob, Store, captured_samples, jobs, migration, schedules, tasks
from service.store.schedule_tables import CAPTURED_SAMPLES, RUN
from service.store.task_choice import Choice
from service.store.values import TaskKind
from tests.support.pg import running_postgres
from tests.support.store_cases import IDENTITY, a_request

SCHEDULES, RUNS, UNITS_A_RUN = 200, 4_000, 5
REPEATS = 5
SERIES = "WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i < {last}) "
TASKS = """
INSERT INTO task (job_id, kind, item, subject, state, epoch, attempts, deaths, owner, leased_at, lease_until)
SELECT id, 'capture', i, id || '/' || i,
  CASE WHEN i < {last} / 2 THEN 'done' WHEN i = {last} / 2 THEN 'leased' ELSE 'pending' END, 1, 1, 0,
  'anybody', '2026-01-01 00:00:00' {cast},
  CASE WHEN i = {last} / 2 THEN '2099-01-01 00:00:00' {cast} END FROM job, n
"""
COPIES = """
INSERT INTO job ({columns}) SELECT {values} FROM job, n WHERE job.id = '{first}'
"""


def fill(store: Store, num_jobs: int, num_tasks: int) -> tuple[str, int]:
    """Make running jobs of so many captures each, half of them done, and one schedule of many runs.

    Return the first job, and the schedule's number.
    """
    first = jobs.new_id()
    store.write(jobs.submit, NewJob.of(first, "first", a_request()))
    with store.writing() as tx:
        tx.connection.execute(text("DELETE FROM task"))
        tx.connection.execute(text("UPDATE job SET state = 'running', plan_done = true"))
        names = list(tx.connection.execute(text("SELECT * FROM job")).keys())
        new = {"number": "number + 1 + i", "id": "'j-' || i"}
        copies = COPIES.format(
            columns=", ".join(names), values=", ".join(new.get(name, name) for name in names), first=first
        )
        tx.connection.execute(text(SERIES.format(last=num_jobs - 2) + copies))
        cast = "" if tx.connection.dialect.name == "sqlite" else "::timestamptz"
        last = num_tasks - 1
        tx.connection.execute(text(SERIES.format(last=last) + TASKS.format(last=last, cast=cast)))
        publish = (
            "INSERT INTO task SELECT id, 'publish', 0, id, 'pending', 0, 0, 0 {} FROM job WHERE id = '{}'"
        )
        tx.connection.execute(text(publish.format(", NULL" * 6, first)))
    source = {"kind": "file", "path": "rows.jsonl"}
    for number in range(SCHEDULES):
        body = {"name": f"s-{number}", "cron": "0 3 * * *", "time_zone": "Europe/Berlin"}
        request = {"model": "org/model", "source": source}
        store.write(schedules.add, NewSchedule.model_validate({**body, "request": request}))
    schedule, _ = store.read(schedules.numbered, "s-0")
    with store.writing() as tx:
        runs, keys = [], []
        for number in range(RUNS):
            slot, job_id = tx.now - timedelta(minutes=RUNS - number), f"j-{number:016x}"
            run = {"schedule": schedule, "slot": slot, "at": slot, "outcome": "submitted", "job_id": job_id}
            runs.append(run | {"job_state": JobState.COMPLETED, "job_ended_at": slot, "identity": IDENTITY})
            key = {"schedule": schedule, "job_id": job_id, "recipe": IDENTITY.recipe_sha256()}
            if number < RUNS // 2:  # later runs found nothing new
                keys += [key | {"unit": unit, "content_hashes": b"k" * 4096} for unit in range(UNITS_A_RUN)]
        tx.connection.execute(insert(RUN), runs)
        tx.connection.execute(insert(CAPTURED_SAMPLES), keys)
        tx.connection.execute(
            text("UPDATE job SET schedule = :number WHERE id = :first"), {"number": schedule, "first": first}
        )
    with store.writing() as tx:
        tx.connection.execute(text("ANALYZE"))
    return first, schedule


def median_ms(act: Callable[[], object]) -> float:
    """Return the median time of an act, which is done once before."""
    act()
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        act()
        times.append(time.perf_counter() - began)
    return round(1e3 * statistics.median(times), 2)


def measure(url: str, num_jobs: int, num_tasks: int) -> dict[str, float | str]:
    """Fill an empty database and time what workers, planners and Prometheus ask it."""
    store = Store(url)
    store.write(migration.migrate)
    first, schedule = fill(store, num_jobs, num_tasks)
    preferred = Choice(prefer_job="j-3000")
    asked = {
        "next capture": lambda: store.read(tasks._next_job, TaskKind.CAPTURE, "nobody"),
        "next capture, another preferred": lambda: store.read(
            tasks._next_job, TaskKind.CAPTURE, "nobody", preferred
        ),
        "next plan, none": lambda: store.read(tasks._next_job, TaskKind.PLAN, "nobody"),
        "next publish": lambda: store.read(tasks._next_job, TaskKind.PUBLISH, "nobody"),
        "lock a repository": lambda: store.write(tasks._lock_subject, TaskKind.PUBLISH, first),
        "earlier runs": lambda: store.read(
            captured_samples.earlier, schedule, "j-none", IDENTITY.recipe_sha256()
        ),
        "first recipe": lambda: store.read(captured_samples.first_recipe, first),
        "scrape": lambda: list(JobMetrics(store, Path(), lambda: 0).collect()),
    }
    times = {name: median_ms(act) for name, act in asked.items()}
    store.close()
    return {"database": url.partition(":")[0], **times}


def main() -> None:
    """Print a JSON object for each database."""
    num_jobs, num_tasks = (int(given) for given in (*sys.argv[1:], 5_000, 200)[:2])
    with tempfile.TemporaryDirectory() as scratch, running_postgres() as server, server.database() as lent:
        for url in (f"sqlite:///{scratch}/quarry.db", lent):
            print(json.dumps(measure(url, num_jobs, num_tasks)), flush=True)


if __name__ == "__main__":
    main()
