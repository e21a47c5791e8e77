"""What is stamped behind a lock has the time at which the lock was given, however long it was waited for."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime

import pytest

from service.errors import EngineDied
from service.store import Store, Transaction, publishing, schedules, tasks, workers
from service.store.tables import TASK, WORKER
from service.store.transitions import lock_job
from service.store.values import TaskKind
from tests.contract.store.test_schedules import schedule
from tests.support.store_cases import TTL_S, Clock, capture, job_id, lease_unit, start_units, submit

WAITED_S = 20.0
pytestmark = pytest.mark.parametrize("url", ["postgresql"], indirect=True)
"""A transaction that writes to SQLite has the one lock before its first statement."""

Verb = Callable[[Transaction], object]


def behind(store: Store, database: Store, clock: Clock, lock: Verb, late: Callable[[], object]) -> object:
    """Hold a lock while another waits for it and time goes by; return what that one did behind it."""
    with ThreadPoolExecutor(1) as beside:
        with database.writing() as tx:
            lock(tx)
            waiting = beside.submit(late)
            while not tx.connection.exec_driver_sql(
                "SELECT count(*) FROM pg_locks WHERE NOT granted"
            ).scalar():
                assert not waiting.done()
            clock.advance(WAITED_S)
        return waiting.result()


@pytest.mark.parametrize("of", ["job", "schedule"])
def test_a_transaction_has_the_time_behind_its_lock(
    store: Store, database: Store, clock: Clock, of: str
) -> None:
    submit(store)
    store.write(schedules.add, schedule())

    def lock(tx: Transaction) -> datetime:
        lock_job(tx, job_id(1)) if of == "job" else schedules._lock(tx, "hourly")
        return tx.now

    begun = store.read(lambda tx: tx.now)
    at = behind(store, database, clock, lock, lambda: store.write(lock))
    assert isinstance(at, datetime) and (at - begun).total_seconds() == WAITED_S


def test_a_lease_of_a_repository_is_as_long_as_ever_behind_another(
    store: Store, database: Store, clock: Clock
) -> None:
    """The job's lock is free, and that of the tasks of its repository is not."""
    capture(store, repo_id="org/data")

    def lock(tx: Transaction) -> None:
        tasks._lock_subject(tx, TaskKind.PUBLISH, "org/data")

    behind(store, database, clock, lock, lambda: publishing.lease(store, "late", TTL_S))
    of_publish = TASK.select().where(TASK.c.kind == TaskKind.PUBLISH)
    with store.reading() as tx:
        until = tx.connection.execute(of_publish).mappings().one()["lease_until"]
        assert (until - tx.now).total_seconds() == TTL_S


def test_a_worker_is_there_from_the_end_of_its_wait(store: Store, database: Store, clock: Clock) -> None:
    start_units(store, units=1)
    lease = lease_unit(store)
    store.write(workers.beat, lease.owner, TTL_S)

    def lock(tx: Transaction) -> None:
        tx.connection.execute(WORKER.select().with_for_update())

    def die() -> None:
        store.write(workers.engine_died, lease, EngineDied("why"), 3600.0, alone=False, sound=False)

    behind(store, database, clock, lock, die)
    with store.reading() as tx:
        until = tx.connection.execute(WORKER.select()).mappings().one()["alive_until"]
        assert (until - tx.now).total_seconds() == TTL_S
