"""Services of neighbouring versions on one database: the older one is refused, no row is lost or doubled."""

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from schemas.names import job_id_from_key
from service.errors import Outcome, StoreUnavailable
from service.store import NewJob, Store, jobs, migration, plans, publishing, tasks, units
from service.store.tables import METADATA
from tests.frozen.databases import MIGRATIONS, STATES, assert_every_row_once, copy_data, load, opened, work
from tests.support.children import settings_environment
from tests.support.engine_bench import until
from tests.support.fake_hub import FakeHub
from tests.support.jobs import FAKE_ENGINE
from tests.support.roles import Capture
from tests.support.store_cases import Clock, a_request, job_id

NEWER = "9999"
HOUR_S = 3600.0


def stamp(url: str, revision: str) -> None:
    """Say that the database is at `revision`, as the migration of a newer service does in its transaction."""
    database = Store(url)
    with database.writing() as tx:
        tx.connection.execute(text("UPDATE alembic_version SET version_num = :new"), {"new": revision})
    database.close()


def contents(url: str) -> dict[str, list[Any]]:
    """Return every row of every table."""
    database = Store(url)
    with database.reading() as tx:
        tables = {name: text(f"SELECT * FROM {name} ORDER BY 1, 2") for name in METADATA.tables}
        found = {name: [tuple(row) for row in tx.connection.execute(query)] for name, query in tables.items()}
    database.close()
    return found


def test_a_service_does_not_start_on_a_database_that_a_newer_one_migrated(url: str) -> None:
    load(MIGRATIONS[-1], url)
    stamp(url, NEWER)
    before = contents(url)
    store = Store(url)
    with pytest.raises(
        StoreUnavailable, match=f"the database is at version {NEWER}, this service at "
    ) as refused:
        store.write(migration.migrate)
    assert refused.value.cure == "restart the newest service"
    store.close()
    assert contents(url) == before


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["worker", "serve"])
def test_the_command_says_so_and_ends(verb: str, tmp_path: Path, hub: FakeHub) -> None:
    url = f"sqlite:///{tmp_path / 'quarry.db'}"
    load(MIGRATIONS[-1], url)
    with opened(tmp_path, url, hub) as shop:
        told = settings_environment(shop.settings.model_copy(update={"engine": FAKE_ENGINE, "port": 0}), {})
    stamp(url, NEWER)
    ended = subprocess.run(
        [sys.executable, "-m", "service.cli", verb],
        env=os.environ | told,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 3
    assert f"the database is at version {NEWER}" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_what_a_service_still_holds_is_refused_when_a_newer_one_migrates(url: str) -> None:
    """1. The older service holds a plan, a unit and a repository. 2. The newer one migrates.

    3. Nothing that the older one says is written, neither of what it holds nor anything new.
    """
    load(MIGRATIONS[-1], url)
    store = Store(url)
    store.write(migration.migrate)
    plan, unit, push = (kind.lease(store, "older", HOUR_S) for kind in (plans, units, publishing))
    assert plan and unit and push
    problem = StoreUnavailable("a test").problem()
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
        lambda: store.write(tasks.fail, plan, problem, Outcome.FAIL, 1),
        lambda: store.write(jobs.cancel, plan.job_id),
        lambda: store.write(jobs.resume, job_id_from_key("blocked")),
    ):
        with pytest.raises(StoreUnavailable, match=NEWER):
            verb()
    assert contents(url) == before
    store.close()


def test_a_worker_that_runs_on_while_a_newer_one_migrates_loses_and_doubles_nothing(
    url: str, hub: FakeHub, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. The older worker has units in its engine when the newer one migrates. 2. It is refused, and stopped.

    3. The newer one takes what the older one held, once its leases are over. 4. Every row is there once.
    """
    monkeypatch.setenv("QUARRY_FAKE_STEP_S", "0.2")
    load(MIGRATIONS[-1], url)
    copy_data(tmp_path)
    with opened(tmp_path, url, hub) as older:
        done = older.store.read(jobs.totals).units_done

        async def overtaken() -> dict[str, list[Any]]:
            loop = Capture(older.store, older.settings, "older")
            task = asyncio.create_task(loop.run())
            await until(lambda: older.store.read(jobs.totals).units_done > done)
            stamp(url, NEWER)
            left = contents(url)
            await until(lambda: f"version {NEWER}" in caplog.text)
            loop.stop.set()
            await task
            return left

        assert asyncio.run(asyncio.wait_for(overtaken(), 120)) == contents(url)
    monkeypatch.delenv("QUARRY_FAKE_STEP_S")
    stamp(url, MIGRATIONS[-1])
    with opened(tmp_path, url, hub) as newer:
        newer.store.close()
        newer.store = Store(url, Clock(time.time() + HOUR_S).of(url))
        newer.store.write(jobs.resume, job_id_from_key("blocked"))
        work(newer)
        for name in STATES:
            assert_every_row_once(newer, name)
