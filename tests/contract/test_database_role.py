"""PostgreSQL with a role that may log in and owns nothing but its tables, beside another's tables."""

import re
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import psycopg
import pytest

from schemas.job import JobState
from service import host
from service.store import jobs, storing
from tests.support.desk import REPO, TOKEN, writable_hub
from tests.support.jobs import Shop, conversations, request
from tests.support.machines import Machine
from tests.support.pg import Postgres
from tests.support.roles import sweep

ROLE = "quarry_service"


@pytest.fixture
def database(postgres: Postgres) -> Iterator[tuple[psycopg.Connection[tuple[object, ...]], str]]:
    """Lend a database's administrator, and its URL for the role."""
    with postgres.database() as url:
        name = url.partition("@/")[2].partition("?")[0]
        with postgres.admin(name) as admin:
            admin.execute(f"CREATE ROLE {ROLE} LOGIN NOSUPERUSER NOCREATEDB NOCREATEROLE")
            try:
                yield admin, url.replace("//quarry@", f"//{ROLE}@")
            finally:
                admin.execute(f"DROP OWNED BY {ROLE}")
                admin.execute(f"DROP ROLE {ROLE}")


def test_a_job_runs_with_a_role_that_owns_nothing_but_its_tables(
    database: tuple[psycopg.Connection[tuple[object, ...]], str], tmp_path: Path, target: Path
) -> None:
    """1. the role makes its tables  2. it may make no more  3. a job runs to its end, and is deleted."""
    admin, url = database
    admin.execute("CREATE TABLE of_another (secret text)")
    admin.execute(f"GRANT CREATE, USAGE ON SCHEMA public TO {ROLE}")
    shop = Shop.open(tmp_path, target, database_url=url)
    admin.execute(f"REVOKE CREATE ON SCHEMA public FROM {ROLE}")
    try:
        job = shop.run(request(target, conversations(8)))
        assert job.state is JobState.COMPLETED, job.problem
        with (
            psycopg.connect(url.replace("+psycopg", "")) as own,
            pytest.raises(psycopg.errors.InsufficientPrivilege),
        ):
            own.execute("SELECT * FROM of_another")
    finally:
        shop.store.close()
    tables = "SELECT tablename, tableowner FROM pg_tables WHERE schemaname = 'public'"
    owners = dict(admin.execute(tables).fetchall())
    assert {table for table, owner in owners.items() if owner != ROLE} == {"of_another"}


def test_a_worker_elsewhere_needs_no_more_than_its_role_may(
    postgres: Postgres, tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its role is made as deploy/README.md says; it captures, stores, and reads no key."""
    told = (Path(__file__).parents[2] / "deploy" / "README.md").read_text()
    (made,) = re.findall(r"```sql\n(.*?)```", told, flags=re.DOTALL)
    monkeypatch.setattr(storing, "LATEST", timedelta(0))
    with postgres.database() as url, writable_hub(tmp_path, monkeypatch) as hub:
        shop = Shop.open(tmp_path, target, database_url=url, hub_endpoint=hub.url, hub_token=TOKEN)
        host.host_of(shop.store, shop.settings)
        with postgres.admin(url.partition("@/")[2].partition("?")[0]) as admin:
            admin.execute(made)
            try:
                own = url.replace("//quarry@", "//quarry_worker@")
                body = request(target, conversations(8), hub={"repo_id": REPO}, generate={"max_tokens": 3})
                job_id = shop.submit(body)
                shop.plan()
                far = Machine(shop, tmp_path / "far", database_url=own)
                far.capture(job_id)
                assert far.keep()
                assert shop.store.read(jobs.job, job_id).progress.units_stored > 0
                sweep(far.store, far.settings)
                with (
                    psycopg.connect(own.replace("+psycopg", "")) as connection,
                    pytest.raises(psycopg.errors.InsufficientPrivilege),
                ):
                    connection.execute("SELECT * FROM api_key")
                far.store.close()
            finally:
                admin.execute("DROP OWNED BY quarry_worker")
                admin.execute("DROP ROLE quarry_worker")
        shop.publish()
        assert shop.store.read(jobs.job, job_id).state is JobState.COMPLETED
        shop.store.close()
