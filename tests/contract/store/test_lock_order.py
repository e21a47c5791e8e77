"""On PostgreSQL two transactions that lock the same rows do so in one order, and neither deadlocks."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
from sqlalchemy import Select, Table, select, update

from schemas.job import JobState
from schemas.request import ExtractRequest, HubTarget
from schemas.schedule import NewSchedule, Overlap
from schemas.source import FileSource
from service.errors import EngineDied, EngineRefused, Outcome
from service.store import (
    HOME,
    Store,
    TaskState,
    clock as clocks,
    consumers,
    deletion,
    hosts,
    jobs,
    plans,
    publishing,
    schedules,
    storing,
    tasks,
    units,
    workers,
)
from service.store.schedule_tables import SCHEDULE
from service.store.tables import CONSUMER, HOST, JOB, SICKNESS, TASK, WORKER
from tests.contract.store.test_workers import fall_sick
from tests.support.store_cases import (
    IDENTITY,
    OWNER,
    PROBLEM,
    TTL_S,
    Clock,
    commit,
    job_id,
    lease_plan,
    lease_publish,
    lease_unit,
    planned,
    start_units,
)

ON_DISK = "SELECT id FROM job ORDER BY ctid"
"""The order in which a statement that asks for none meets them."""
WAITING = "SELECT count(*) FROM pg_locks WHERE NOT granted"
pytestmark = pytest.mark.parametrize("url", ["postgresql"], indirect=True)


def behind(database: Store, rows: Select[Any], *acts: Callable[[], object]) -> list[object]:
    """Lock rows until every act waits, one after the other; return what they return."""
    with ThreadPoolExecutor(len(acts)) as beside:
        with database.writing() as tx:
            tx.connection.execute(rows.with_for_update())
            running = []
            for act in acts:
                running.append(beside.submit(act))
                while tx.connection.exec_driver_sql(WAITING).scalar() != len(running):
                    assert not any(one.done() for one in running)
        return [one.result(60) for one in running]


def test_a_unit_that_ends_its_job_and_the_extension_of_its_workers_leases_both_succeed(
    store: Store, database: Store
) -> None:
    """1. The end of the second unit waits for the workers. 2. Both leases are extended. 3. Both end."""
    start_units(store, units=2)
    leases = [lease_unit(store) for _ in range(2)]
    store.write(workers.beat, OWNER, TTL_S)
    pass_on = partial(store.write, workers.pass_on, leases[1], EngineRefused("why"), 3600.0)
    extend = partial(store.write, tasks.extend, leases, TTL_S)
    assert behind(database, select(WORKER), pass_on, extend) == [None, leases]
    assert store.read(jobs.state, job_id(1)) is JobState.FAILED


def test_the_end_of_a_unit_and_of_its_worker_both_succeed(store: Store, database: Store) -> None:
    """Of units 9 and 10, of which 9 comes last by its subject, and was leased last."""
    start_units(store, units=11)
    leases = [lease_unit(store) for _ in range(11)]
    store.write(tasks.release, leases[9])
    leases[9] = lease_unit(store)
    for lease in leases[:9]:
        store.write(tasks.release, lease)
    release = partial(store.write, tasks.release, leases[9])
    ninth = select(TASK).where(TASK.c.item == 9)
    behind(database, ninth, release, partial(store.write, tasks.release_owner, OWNER))
    assert {row.state for row in store.read(units.of_job, job_id(1))} == {TaskState.PENDING}


def test_a_beat_that_removes_a_worker_that_is_gone_and_the_death_of_another_one_both_succeed(
    store: Store, database: Store, clock: Clock
) -> None:
    """1. A beat waits for its host. 2. A death locks all workers. 3. The beat removes one of these."""
    store.write(hosts.register, "0" * 32, "host", is_home=True)
    start_units(store)
    lease = lease_unit(store, "b")
    for owner in ("a", "b", "c"):
        store.write(workers.beat, owner, TTL_S)
    clock.advance((workers.GONE + 1) * TTL_S)
    beat = partial(store.write, workers.beat, "d", TTL_S)
    how = {"rest_s": 3600.0, "alone": False, "sound": False}
    death = partial(store.write, workers.engine_died, lease, EngineDied("why"), **how)
    behind(database, select(HOST), beat, death)


def test_a_beat_that_is_late_and_the_death_of_another_worker_both_succeed(
    store: Store, database: Store, clock: Clock
) -> None:
    """1. A death locks the first worker. 2. The last one beats, and gives the others time to come back."""
    store.write(hosts.register, "0" * 32, "host", is_home=True)
    start_units(store)
    lease = lease_unit(store, "a")
    for owner in ("a", "b", "c"):
        store.write(workers.beat, owner, TTL_S)
    clock.advance(2 * TTL_S)
    how = {"rest_s": 3600.0, "alone": False, "sound": False}
    death = partial(store.write, workers.engine_died, lease, EngineDied("why"), **how)
    rows = select(WORKER).join(HOST, HOST.c.number == WORKER.c.host).where(WORKER.c.owner == "b")
    behind(database, rows, death, partial(store.write, workers.beat, "c", TTL_S))


def test_a_job_that_is_resumed_while_a_worker_that_rests_from_it_blocks_it_goes_on(
    store: Store, database: Store, clock: Clock
) -> None:
    """1. A resume waits for the job. 2. So does who found before it that no worker takes the job."""
    start_units(store)
    (sickness,) = fall_sick(store, clock, "one")
    store.write(workers.block, sickness)
    assert store.read(jobs.state, job_id(1)) is JobState.BLOCKED
    resume = partial(store.write, jobs.resume, job_id(1))
    behind(database, select(JOB), resume, partial(store.write, workers.block, sickness))
    assert store.read(jobs.state, job_id(1)) is JobState.QUEUED


@pytest.mark.parametrize("act", [jobs.resume, deletion.forget])
def test_a_beat_that_removes_workers_that_are_gone_and_who_changes_their_sicknesses_both_succeed(
    store: Store, database: Store, clock: Clock, act: Callable[..., object]
) -> None:
    """1. A beat removes two workers that refuse a job. 2. It is resumed or deleted. 3. Both wait for one."""
    start_units(store)
    for owner in ("a", "b", "c"):
        store.write(workers.beat, owner, TTL_S)
    for owner in ("a", "b"):
        store.write(workers.pass_on, lease_unit(store, owner), EngineRefused("why"), 3600.0)
    for owner in ("b", "a"):  # the rows are now in this order, and those of the sicknesses in the other
        store.write(workers.beat, owner, TTL_S)
    store.write(jobs.cancel, job_id(1))
    if act is deletion.forget:
        store.write(deletion.begin, job_id(1), with_dataset=False)
    clock.advance((workers.GONE + 1) * TTL_S)
    beat, changed = partial(store.write, workers.beat, "d", TTL_S), partial(store.write, act, job_id(1))
    behind(database, select(SICKNESS).where(SICKNESS.c.owner == "b"), beat, changed)
    assert store.read(lambda tx: tx.connection.scalars(select(WORKER.c.owner)).all()) == ["d"]


def start_with_consumers(store: Store, *names: str) -> None:
    """Start a job whose shards are consumed, by consumers that are written in this order."""
    start_units(store)
    store.write(lambda tx: tx.connection.execute(update(JOB).values(keeps_local=False)))
    store.write(consumers.listens)
    for name in names:
        store.write(consumers.acknowledge, job_id(1), name, -1, 3600)


def test_a_job_that_is_deleted_and_a_service_that_hears_its_consumers_again_both_succeed(
    store: Store, database: Store, clock: Clock
) -> None:
    """1. The last consumer is written first. 2. The job is deleted. 3. A gap of the service is over."""
    start_with_consumers(store, "c", "b", "a")
    store.write(lambda tx: tx.connection.exec_driver_sql("ANALYZE consumer"))  # so that all of it is read
    store.write(jobs.cancel, job_id(1))
    store.write(deletion.begin, job_id(1), with_dataset=False)
    clock.advance(60)
    forget = partial(store.write, deletion.forget, job_id(1))
    second = select(CONSUMER).where(CONSUMER.c.name == "b")
    assert behind(database, second, forget, partial(store.write, consumers.listens)) == [False, None]


def test_a_consumer_that_is_heard_after_a_gap_and_one_that_acknowledges_both_succeed(
    store: Store, database: Store, clock: Clock
) -> None:
    """1. One is heard without its units in place, and moves on all after the gap. 2. Another acknowledges."""
    start_with_consumers(store, "a", "b")
    clock.advance(60)
    heard = partial(store.write, consumers.heard, job_id(1), "b", 3600)
    acknowledge = partial(store.write, consumers.acknowledge, job_id(1), "a", -1, 3600)
    assert behind(database, select(CONSUMER).where(CONSUMER.c.name == "a"), heard, acknowledge) == [None, []]


def test_a_host_that_stores_its_last_unit_while_it_is_given_up_leaves_a_job_that_is_published(
    store: Store, database: Store
) -> None:
    """1. The host's last commit to the repository ends. 2. It is given up meanwhile, with nothing left."""
    store.write(hosts.register, "0" * 32, "home", is_home=True)
    far = store.write(hosts.register, "1" * 32, "far", is_home=False)
    start_units(store, units=1, repo_id="org/data")
    lease = units.lease(store, OWNER, TTL_S, host=far)
    assert lease is not None
    commit(store, lease)
    storer = storing.lease(store, OWNER, TTL_S, far)
    assert storer is not None
    stored = partial(store.write, storing.stored, storer, [0])
    assert behind(database, select(JOB), stored, partial(store.write, hosts.forget, "1" * 32)) == [None, 0]
    store.write(publishing.complete, lease_publish(store), "c0ffee")


def test_a_storing_that_fails_its_job_and_the_extension_of_its_workers_leases_both_succeed(
    store: Store, database: Store, clock: Clock
) -> None:
    """1. The leases are extended. 2. A storing fails. 3. Both wait for a unit of the job, in this order."""
    start_units(store, units=2, repo_id="org/data")
    commit(store, lease_unit(store))
    unit = lease_unit(store)
    clock.advance(storing.LATEST.total_seconds())
    storer = storing.lease(store, "storer", TTL_S)
    assert storer is not None
    extend = partial(store.write, tasks.extend, [unit, storer], TTL_S)
    fail = partial(store.write, tasks.fail, storer, PROBLEM, Outcome.FAIL, 1)
    assert behind(database, select(TASK).where(TASK.c.item == unit.item), extend, fail) == [[], None]
    assert store.read(jobs.state, job_id(1)) is JobState.FAILED


def test_a_disk_that_fills_waits_for_no_job_as_who_gives_up_its_host_locks_them_in_order(
    store: Store, database: Store
) -> None:
    for number in (1, 2):
        start_units(store, units=2, number=number, repo_id="org/data")
        commit(store, lease_unit(store, job=job_id(number)))
    store.write(lambda tx: tx.connection.execute(update(JOB).values(keeps_local=False)))
    with database.writing() as tx:
        first = select(TASK).where(TASK.c.kind == "store", TASK.c.job_id == job_id(1))
        tx.connection.execute(first.with_for_update())
        store.write(storing.hasten, HOME)
    lease = storing.lease(store, OWNER, TTL_S)
    assert lease is not None and lease.job_id == job_id(2)


@pytest.mark.parametrize("rows", [WORKER, TASK])
def test_a_clock_that_is_set_right_and_who_locks_workers_or_leases_in_order_both_succeed(
    store: Store, database: Store, clock: Clock, rows: Table
) -> None:
    """1. A clock is an hour ahead: the last rows are written first. 2. It is set right, and swept."""
    start_units(store, units=2)
    clock.advance(3600)
    for owner in (OWNER, "a"):
        store.write(workers.beat, owner, TTL_S)
    leases = [lease_unit(store) for _ in range(2)]
    store.write(tasks.release, leases[0])
    leases[0] = lease_unit(store)
    clock.advance(-3600)
    acts = {
        WORKER: (WORKER.c.owner == OWNER, partial(store.write, workers.forget_refusals, job_id(1))),
        TASK: (TASK.c.item == 1, partial(store.write, tasks.extend, leases, TTL_S)),
    }
    last, act = acts[rows]
    behind(database, select(rows).where(last), partial(store.write, clocks.set_right, TTL_S, TTL_S), act)


@pytest.mark.parametrize("act", [schedules.run_now, schedules.remove])
def test_a_schedules_jobs_are_locked_in_order_as_by_who_gives_up_their_host(
    store: Store, database: Store, clock: Clock, act: Callable[..., object]
) -> None:
    """1. A host with units of a stopped job and of the last one is given up. 2. Both wait for the first."""
    store.write(hosts.register, "0" * 32, "home", is_home=True)
    far = store.write(hosts.register, "1" * 32, "far", is_home=False)
    source = FileSource(kind="file", path="/a.jsonl")
    body = ExtractRequest(model="org/model", source=source, hub=HubTarget(repo_id="org/data"))
    rules = {"cron": "0 0 * * *", "overlap": Overlap.REPLACE}
    store.write(schedules.add, NewSchedule(name="nightly", request=body, **rules))
    made = []
    for _ in range(2):
        clock.advance(1)
        made.append(store.write(schedules.run_now, "nightly").job_id)
        plan = lease_plan(store)
        store.write(plans.set_identity, plan, IDENTITY)
        for unit in range(2):
            store.write(plans.add_unit, plan, planned(unit), ())
        store.write(plans.finish, plan, ())
        lease = units.lease(store, OWNER, TTL_S, host=far, prefer_job=made[-1])
        assert lease is not None
        commit(store, lease)
        if len(made) == 1:
            store.write(jobs.pause, made[0])  # so that the next run does not publish it yet
            store.write(lambda tx: tx.connection.execute(update(SCHEDULE).values(last_job=None)))
    store.write(jobs.cancel, made[0])
    moved = update(JOB).where(JOB.c.id == made[0]).values(priority=1)
    while store.read(lambda tx: tx.connection.exec_driver_sql(ON_DISK).scalar()) == made[0]:
        store.write(lambda tx: tx.connection.execute(moved))
    clock.advance(1)
    forget, acts = partial(store.write, hosts.forget, "1" * 32), partial(store.write, act, "nightly")
    first = select(JOB).where(JOB.c.id == made[0])
    assert behind(database, first, forget, acts)[0] == 2
