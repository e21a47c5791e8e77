"""A database that an older service has made: what is in it is kept, and new columns are filled from it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from alembic import command
from alembic.config import Config
from sqlalchemy import bindparam, text

import service.migrations
from schemas.request import ExtractRequest, HubSource, InlineSource, Sample
from schemas.schedule import Missed, Samples
from service.errors import Outcome
from service.store import Store, Transaction, jobs, migration, plans, schedules, tasks, units
from service.store.tables import UtcTime
from tests.support.store_cases import OWNER, PROBLEM, TTL_S, Clock, job_id, lease_plan

REQUESTS = (
    ExtractRequest(
        model="org/first",
        source=InlineSource(kind="inline", samples=(Sample(text="a \x00 and a \\u0000"),)),
        loss="all",
    ),
    ExtractRequest(model="org/second", source=HubSource(kind="hub", repo_id="org/data")),
)
COUNTERS = (
    "samples_planned, samples_written, samples_rejected, tokens_planned, tokens_written, bytes_written, "
    "units_planned, units_done, units_failed"
)


def upgrade(tx: Transaction, revision: str) -> None:
    config = Config()
    config.set_main_option("script_location", str(Path(service.migrations.__file__).parent))
    config.attributes["connection"] = tx.connection
    command.upgrade(config, revision)


@pytest.fixture
def first(url: str, clock: Clock) -> Iterator[Store]:
    """A database of the first version with two jobs, the older one with a unit that is leased."""
    database = Store(url, clock.of(url))
    with database.writing() as tx:
        upgrade(tx, "0001")
        for number, request in enumerate(REQUESTS):
            job = text(
                f"INSERT INTO job (id, idempotency_key, request_sha256, publish_subject, state, plan_done, "
                f"{COUNTERS}, last_event, created_at, updated_at) VALUES (:id, :key, '', :key, 'queued', "
                f"false, {', '.join('0' * 9)}, 0, :now, :now)"
            ).bindparams(bindparam("now", tx.now, UtcTime))
            tx.connection.execute(job, {"id": job_id(number), "key": f"key-{number}"})
            body = text("INSERT INTO request (job_id, body) VALUES (:id, :body)")
            tx.connection.execute(body, {"id": job_id(number), "body": request.model_dump_json()})
        unit = text(
            "INSERT INTO unit (job_id, unit, state, epoch, attempts, num_samples, num_tokens, plan_sha256) "
            "VALUES (:id, 0, 'pending', 4, 2, 1, 1, '')"
        )
        tx.connection.execute(unit, {"id": job_id(0)})
        role = text(
            "INSERT INTO role_lease (role, subject, job_id, epoch, owner, lease_until) "
            "VALUES ('plan', :id, :id, 60, 'dead', :now)"
        ).bindparams(bindparam("now", tx.now, UtcTime))
        tx.connection.execute(role, {"id": job_id(0)})
    yield database
    database.close()


@pytest.fixture
def upgraded(first: Store, url: str, clock: Clock) -> Iterator[Store]:
    store = Store(url, clock.of(url))
    store.write(migration.migrate)
    yield store
    store.close()


def test_jobs_of_an_older_service_are_listed_with_their_model_and_source(upgraded: Store) -> None:
    """The samples of the first hold NUL characters, which no JSON function of PostgreSQL takes."""
    listed = [(job.id, job.model, job.source_kind) for job in upgraded.read(jobs.page)[0]]
    assert listed == [(job_id(1), "org/second", "hub"), (job_id(0), "org/first", "inline")]
    assert [upgraded.read(jobs.request, job_id(number)) for number in (0, 1)] == list(REQUESTS)


def test_units_of_an_older_service_begin_without_deaths(upgraded: Store) -> None:
    (row,) = upgraded.read(units.of_job, job_id(0))
    assert (row.epoch, row.attempts, row.deaths) == (4, 2, 0)


def test_plans_of_an_older_service_begin_without_failures(upgraded: Store, clock: Clock) -> None:
    """Sixty planners had the job, in whatever order they ended; one that fails now is the first."""
    lease = lease_plan(upgraded)
    assert (lease.job_id, lease.epoch) == (job_id(0), 61)
    upgraded.write(tasks.fail, lease, PROBLEM, Outcome.RETRY, 2)
    clock.advance(TTL_S)
    assert lease_plan(upgraded).epoch == 62


def test_an_upgraded_database_takes_new_work(upgraded: Store) -> None:
    upgraded.read(migration.check)
    assert plans.lease(upgraded, OWNER, TTL_S) is not None


def test_a_schedule_of_an_older_service_goes_on_taking_all_samples(url: str, clock: Clock) -> None:
    store = Store(url, clock.of(url))
    with store.writing() as tx:
        upgrade(tx, "0007")
        values = '\'old\', \'{"cron":"0 3 * * *","missed":"all"}\', false, :now'
        row = text(f"INSERT INTO schedule (name, rules, paused, created_at) VALUES ({values})")
        tx.connection.execute(row.bindparams(bindparam("now", tx.now, UtcTime)))
    store.write(migration.migrate)
    view = store.read(schedules.schedule_view, "old")
    assert (view.samples, view.missed, view.cron) == (Samples.ALL, Missed.ALL, "0 3 * * *")
    store.close()
