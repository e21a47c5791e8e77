"""A PostgreSQL that fails over: a standby that answers in the primary's place counts as no database."""

import pytest

from service.errors import StoreUnavailable
from service.store import Store, jobs, migration, plans
from service.store.database import check_writable
from tests.support.pg import Postgres, running_postgres
from tests.support.store_cases import TTL_S, job_id, submit


def test_a_standby_that_answers_for_a_moment_is_waited_for(postgres: Postgres) -> None:
    """1. The server is a hot standby for a while. 2. It is promoted. 3. The same store goes on.

    A look at the standby finds another server that takes writes, if the URL names one.
    """
    with running_postgres() as server, server.database() as url, postgres.database() as primary:
        # The second meets it behind its connection, as through a proxy.
        store, met_later = Store(url), Store(f"{url}&target_session_attrs=any")
        store.write(migration.migrate)
        submit(store)
        server.stand_by()
        for opened in (store, met_later):
            with pytest.raises(StoreUnavailable) as away:
                plans.lease(opened, "planner", TTL_S)
            assert away.value.cure
            with pytest.raises(StoreUnavailable):
                opened.write(jobs.cancel, job_id(1))
        looks = Store(url, read_only=True)
        assert looks.read(jobs.job, job_id(1)).id == job_id(1)
        looks.close()
        both = ",".join(one.partition("?host=")[2] for one in (url, primary))
        looks = Store(f"postgresql+psycopg://quarry@/postgres?host={both}", read_only=True)
        looks.read(check_writable)
        looks.close()
        server.promote()
        for opened in (store, met_later):
            lease = plans.lease(opened, "planner", 0.0)
            assert lease is not None and lease.job_id == job_id(1)
            opened.close()


def test_a_transaction_that_is_told_to_change_nothing_is_an_unavailable_store(postgres: Postgres) -> None:
    with postgres.database() as url:
        store = Store(url)
        store.write(migration.migrate)
        with pytest.raises(StoreUnavailable, match="takes no writes"), store.writing() as tx:
            tx.connection.exec_driver_sql("SET TRANSACTION READ ONLY")
            tx.connection.exec_driver_sql("DELETE FROM task")
        store.close()
