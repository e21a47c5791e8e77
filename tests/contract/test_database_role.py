"""PostgreSQL with a role that may log in and owns nothing but its tables, beside another's tables."""

from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from schemas.job import JobState
from tests.support.jobs import Shop, conversations, request
from tests.support.pg import Postgres

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
