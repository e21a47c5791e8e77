"""Services of neighbouring versions on one database: the other one is refused, no row is lost or doubled."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from schemas.job import JobState
from schemas.keys import NewKey, Scope
from schemas.request import ExtractRequest
from schemas.schedule import NewSchedule
from schemas.source import PostedSource
from service.errors import Outcome, StoreUnavailable
from service.store import (
    HOME,
    NewJob,
    Store,
    canaries,
    clock,
    hosts,
    jobs,
    keys,
    migration,
    plans,
    publishing,
    runs,
    schedules,
    storing,
    tasks,
    totals,
    units,
    workers,
)
from service.store.tables import JOB, METADATA
from tests.support.children import settings_environment
from tests.support.finished_job import a_canary
from tests.support.jobs import Shop, conversations, request
from tests.support.roles import Capture
from tests.support.store_cases import (
    PROBLEM,
    Clock,
    a_request,
    capture,
    job_id,
    reach,
    start_units,
    submit,
)
from tests.support.waiting import until

NEWER, OLDER = "9999", "0009"
HOUR_S = 3600.0


@pytest.fixture
def migrated(url: str) -> Iterator[Store]:
    store = Store(url)
    store.write(migration.migrate)
    yield store
    store.close()


def stamp(url: str, revision: str) -> None:
    """Say that the database is at `revision`, as the migration of a newer service does in its transaction.

    It changes tables, and so waits for whoever writes to them.
    """
    database = Store(url)
    with database.writing() as tx:
        if url.startswith("postgresql"):
            for table in (JOB.name, *METADATA.tables):  # in the order in which writers lock
                tx.connection.execute(text(f"LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE"))
        tx.connection.execute(text("UPDATE alembic_version SET version_num = :new"), {"new": revision})
    database.close()


def contents(url: str) -> dict[str, list[Any]]:
    """Return every row of every table."""
    database = Store(url)
    with database.reading() as tx:
        tables = {name: text(f"SELECT * FROM {name}") for name in METADATA.tables}
        rows = {name: map(tuple, tx.connection.execute(query)) for name, query in tables.items()}
        found = {name: sorted(rows_of, key=repr) for name, rows_of in rows.items()}
    database.close()
    return found


@pytest.mark.parametrize("other", [NEWER, OLDER])
def test_a_service_does_not_start_on_a_database_of_another_version(
    url: str, migrated: Store, other: str
) -> None:
    submit(migrated)
    stamp(url, other)
    before = contents(url)
    store = Store(url)
    with pytest.raises(
        StoreUnavailable, match=f"the database is at version {other}, this service at "
    ) as refused:
        store.write(migration.migrate)
    assert refused.value.cure
    store.close()
    assert contents(url) == before


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["worker", "serve"])
def test_the_command_says_so_and_ends(verb: str, shop: Shop) -> None:
    stamp(shop.settings.database(), OLDER)
    changed = shop.settings.model_copy(update={"port": 0})
    ended = subprocess.run(
        [sys.executable, "-m", "service.cli", verb],
        env=os.environ | settings_environment(changed, {}),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 3
    assert f"the database is at version {OLDER}" in ended.stderr
    assert "before 0.2.0" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_what_a_service_still_holds_is_refused_when_a_newer_one_migrates(url: str, migrated: Store) -> None:
    """1. The older service holds a plan, a unit and a repository. 2. The newer one migrates.

    3. Nothing that the older one says is written, neither of what it holds nor anything new.
    """
    store = migrated
    reach(store, JobState.BLOCKED, 2)
    capture(store, number=3)
    start_units(store, number=4)
    submit(store, 5)
    submit(store, 6)
    plan, unit, push = (kind.lease(store, "older", HOUR_S) for kind in (plans, units, publishing))
    assert plan and unit and push
    key = NewKey(name="one", scopes=[Scope.JOBS_READ])
    store.write(keys.add, "k1", "1" * 64, key)
    posted = ExtractRequest(model="org/model", source=PostedSource(kind="posted"))
    nightly = NewSchedule(name="nightly", cron="0 3 * * *", request=posted)
    stamp(url, NEWER)
    before = contents(url)
    for verb in (
        lambda: store.write(jobs.submit, NewJob.of(job_id(1), "new", a_request())),
        lambda: plans.lease(store, "older", HOUR_S),
        lambda: units.lease(store, "older", HOUR_S),
        lambda: store.write(tasks.extend, [plan, unit], HOUR_S),
        lambda: store.write(plans.finish, plan, ()),
        lambda: store.write(tasks.release, unit),
        lambda: store.write(tasks.release_owner, "older"),
        lambda: store.write(publishing.complete, push, None),
        lambda: store.write(tasks.fail, plan, PROBLEM, Outcome.FAIL, 1),
        lambda: store.write(jobs.cancel, plan.job_id),
        lambda: store.write(jobs.resume, job_id(2)),
        lambda: store.write(workers.beat, "older", HOUR_S),
        lambda: store.write(workers.seen, HOME),
        lambda: store.write(workers.leave, "older"),
        lambda: store.write(hosts.forget, "0" * 32),
        lambda: store.write(storing.hasten, HOME),
        lambda: store.write(clock.set_right, HOUR_S, HOUR_S),
        lambda: store.write(clock.set_slots_right),
        lambda: store.write(schedules.add, nightly),
        lambda: store.write(keys.add, "k2", "0" * 64, key),
        lambda: store.write(keys.revoke, "k1"),
        lambda: store.write(runs.note, job_id(5), "begun anew"),
        lambda: store.write(canaries.record, "0" * 64, a_canary()),
    ):
        with pytest.raises(StoreUnavailable, match=NEWER):
            verb()
    assert contents(url) == before


def test_a_worker_that_runs_on_while_a_newer_one_migrates_loses_and_doubles_nothing(
    url: str, target: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. The older worker has units in its engine when the newer one migrates. 2. It is refused, and stopped.

    3. The newer one takes what the older one held, once its leases are over. 4. Every row is there once.
    """
    monkeypatch.setenv("QUARRY_FAKE_STEP_S", "0.2")
    samples = conversations(12)
    older = Shop.open(tmp_path, target, database_url=url, unit_max_samples=2)
    job = older.submit(request(target, samples))
    older.plan()
    with older.store.reading() as tx:
        version = tx.connection.scalar(migration.VERSION)

    async def overtaken() -> dict[str, list[Any]]:
        loop = Capture(older.store, older.settings, "older")
        task = asyncio.create_task(loop.run())
        await until(lambda: older.store.read(totals.totals).units_done > 0)
        stamp(url, NEWER)
        left = contents(url)
        await until(lambda: f"version {NEWER}" in caplog.text)
        loop.stop.set()
        await task
        return left

    assert asyncio.run(asyncio.wait_for(overtaken(), 120)) == contents(url)
    older.store.close()
    monkeypatch.delenv("QUARRY_FAKE_STEP_S")
    stamp(url, version)
    newer = Shop(older.settings, Store(url, Clock(time.time() + HOUR_S).of(url)))
    assert newer.finish(job).state is JobState.COMPLETED
    assert sorted(row["source_id"] for row in newer.rows(job)) == sorted(sample["id"] for sample in samples)
    newer.store.close()
