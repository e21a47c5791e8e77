"""A row that cannot be read, such as one of a later version, holds up the work on its own job alone."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Text, cast, func, select, update

from schemas.job import JobState
from schemas.schedule import NewSchedule, ScheduleState, ScheduleView, UnreadableSchedule
from schemas.webhook import Webhook
from schemas.worker import WorkerStatus
from service.control.deletion import run_retention
from service.control.scheduling import run_slots
from service.errors import IllegalMove, NotFound, QuarryError
from service.settings import Settings
from service.store import (
    Lease,
    NewJob,
    Store,
    TaskState,
    canaries,
    captured_samples,
    commits,
    deletion,
    hosts,
    jobs,
    plans,
    publishing,
    schedules,
    tasks,
    units,
    webhooks,
    workers,
)
from service.store.clock import set_slots_right
from service.store.schedule_tables import RUN, SCHEDULE
from service.store.stopping import stop
from service.store.tables import CANARY, EVENT, JOB, REJECT, TASK, WORKER
from service.store.transitions import lock_job
from service.work.keeper import Keeper
from service.work.runner import LoopContext
from tests.support.finished_job import a_canary
from tests.support.store_cases import (
    IDENTITY,
    OWNER,
    PROBLEM,
    TTL_S,
    Clock,
    a_request,
    capture,
    commit,
    job_id,
    lease_plan,
    lease_publish,
    reach,
    start_units,
    submit,
)

FIRST, SECOND = job_id(1), job_id(2)
DAY_S = 86_400.0
AGAIN = NewJob.of(FIRST, "key-1", a_request())


def damage(database: Store, column: Any, job: Any) -> None:
    with database.writing() as tx:
        tx.connection.execute(update(column.table).where(job == FIRST).values({column: cast("{", Text)}))


@pytest.mark.parametrize(
    ("begin", "lease"),
    [
        (submit, plans.lease),
        (lambda store, n: start_units(store, 1, n), units.lease),
        (lambda store, n: capture(store, 1, n), publishing.lease),
        (lambda store, n: reach(store, JobState.DELETING, n), deletion.lease),
    ],
    ids=["plan", "capture", "publish", "delete"],
)
def test_a_job_that_can_neither_be_leased_nor_blocked_is_tried_again_later(
    begin: Callable[[Store, int], object],
    lease: Callable[[Store, str, float], Lease | None],
    store: Store,
    database: Store,
    clock: Clock,
) -> None:
    for number in (1, 2):
        begin(store, number)
    damage(database, JOB.c.problem, JOB.c.id)
    taken = lease(store, OWNER, TTL_S)
    assert taken is not None
    assert taken.job_id == SECOND
    assert lease(store, OWNER, TTL_S) is None
    with database.writing() as tx:
        tx.connection.execute(update(JOB).values(problem=None))
    clock.advance(tasks.HELD_BACK.total_seconds())
    taken = lease(store, OWNER, TTL_S)
    assert taken is not None
    assert taken.job_id == FIRST


def test_an_expired_lease_of_a_damaged_job_does_not_keep_its_repository(
    store: Store, database: Store, clock: Clock
) -> None:
    """One lease at a time may write to a repository."""
    for number in (1, 2):
        capture(store, 1, number, "org/set")
    assert lease_publish(store).job_id == FIRST
    damage(database, JOB.c.problem, JOB.c.id)
    clock.advance(TTL_S)
    taken = [publishing.lease(store, "worker-2", TTL_S) for _ in range(2)]
    assert [lease and lease.job_id for lease in taken] == [SECOND, None]


@pytest.mark.parametrize("died", [False, True])
def test_a_report_whose_event_cannot_be_read_holds_up_no_other(
    store: Store, database: Store, clock: Clock, died: bool
) -> None:
    """One report of an owner is sent at a time; the worker that had the damaged one may have died."""
    request = a_request().model_copy(update={"webhook": Webhook(url="https://receiver.example/")})
    for job in (FIRST, SECOND):
        store.write(jobs.submit, NewJob.of(job, job, request))
        store.write(jobs.cancel, job)
    if died:
        lease = webhooks.lease(store, OWNER, TTL_S)
        assert lease is not None and lease.job_id == FIRST
        clock.advance(TTL_S)
    damage(database, EVENT.c.entry, EVENT.c.job_id)
    lease = webhooks.lease(store, "worker-2", TTL_S)
    assert lease is not None and lease.job_id == SECOND
    assert store.read(jobs.state, FIRST) is JobState.CANCELLED


def test_a_report_whose_event_cannot_be_read_stops_no_job(store: Store, database: Store) -> None:
    """It is of an earlier end: the job was resumed since."""
    request = a_request().model_copy(update={"webhook": Webhook(url="https://receiver.example/")})
    store.write(jobs.submit, NewJob.of(FIRST, FIRST, request))
    store.write(jobs.cancel, FIRST)
    damage(database, EVENT.c.entry, EVENT.c.job_id)
    store.write(jobs.resume, FIRST)
    lease = lease_plan(store)
    assert webhooks.lease(store, OWNER, TTL_S) is None
    assert store.read(jobs.state, FIRST) is JobState.RUNNING
    assert store.write(tasks.extend, [lease], TTL_S) == []


def test_what_a_later_version_adds_to_what_is_shown_is_left_out(store: Store, database: Store) -> None:
    """1. A newer worker is there, on the same tables. 2. It blocks a job. 3. All is shown by this version."""
    submit(store)
    with store.writing() as tx:
        hosts.register(tx, "a" * 32, "node", is_home=True)
        workers.beat(tx, OWNER, TTL_S, status=WorkerStatus(version="9.9"))
        stop(tx, lock_job(tx, FIRST), JobState.BLOCKED, PROBLEM)
        canaries.record(tx, "key", a_canary())
    for column in WORKER.c.status, JOB.c.problem, EVENT.c.entry, CANARY.c.report:
        with database.writing() as tx:
            newer = func.replace(cast(column, Text), "{", '{"new": 1, ', type_=Text)
            tx.connection.execute(update(column.table).values({column: newer}))
    with database.writing() as tx:
        role = func.replace(cast(WORKER.c.status, Text), '"roles":[', '"roles":["new"', type_=Text)
        tx.connection.execute(update(WORKER).values(status=role))
        kind = func.replace(cast(EVENT.c.entry, Text), '"kind":"state"', '"kind":"new"', type_=Text)
        tx.connection.execute(update(EVENT).values(entry=kind))
    [host] = store.read(hosts.views)
    assert [(one.version, one.roles) for one in host.workers] == [("9.9", ("new",))]
    assert store.read(jobs.job, FIRST).problem == PROBLEM
    last = store.read(jobs.events, FIRST, after=0)[-1]
    assert (last.kind, last.problem) == ("new", PROBLEM)
    assert store.read(canaries.report, "key") == a_canary()


def test_a_job_whose_kind_of_source_only_a_later_version_knows_is_shown(
    store: Store, database: Store
) -> None:
    submit(store)
    with database.writing() as tx:
        tx.connection.execute(update(JOB).values(source_kind="later"))
    (listed,), _ = store.read(jobs.page)
    assert '"source_kind":"later"' in listed.view().model_dump_json()


@pytest.mark.parametrize(
    ("column", "reads"),
    [
        (JOB.c.problem, [jobs.job, lambda tx, _: jobs.submitted(tx, AGAIN)]),
        (JOB.c.identity, [jobs.job]),
        (EVENT.c.entry, [jobs.events, partial(jobs.recent_events, limit=5)]),
        (REJECT.c.entry, [commits.rejects]),
    ],
)
def test_a_job_of_which_something_cannot_be_read_is_named(
    store: Store, database: Store, column: Any, reads: Sequence[Callable[..., object]]
) -> None:
    for number in (1, 2):
        start_units(store, 0, number)
    damage(database, column, JOB.c.id if column.table is JOB else column.table.c.job_id)
    for read in reads:
        with pytest.raises(QuarryError, match=f"of job {FIRST} cannot be read: Invalid JSON"):
            store.read(read, FIRST)
        if column.table is not JOB:
            assert store.read(read, SECOND)


@pytest.mark.parametrize("column", [JOB.c.problem, JOB.c.identity, JOB.c.provenance])
def test_a_job_that_cannot_be_read_ends_no_list_of_jobs(store: Store, database: Store, column: Any) -> None:
    for number in (1, 2):
        start_units(store, 0, number)
    before, _ = store.read(jobs.page)
    damage(database, column, JOB.c.id)
    (whole,), cursor = store.read(jobs.page, limit=1)
    (damaged,), last = store.read(jobs.page, cursor=cursor, limit=1)
    assert (whole, last) == (before[0], None)
    assert damaged.problem is not None and f"of job {FIRST} cannot be read" in damaged.problem.detail
    assert damaged == replace(before[1], problem=damaged.problem, identity=None)
    assert damaged.view().problem == damaged.problem


@pytest.mark.parametrize("column", [JOB.c.problem, JOB.c.identity, JOB.c.provenance, TASK.c.problem])
def test_a_job_that_cannot_be_read_is_cancelled_as_it_is_and_deleted(
    store: Store, database: Store, column: Any
) -> None:
    """Put right between the two, it would go on where it was."""
    start_units(store)
    lease = units.lease(store, OWNER, TTL_S)
    assert lease is not None
    damage(database, column, JOB.c.id if column.table is JOB else TASK.c.job_id)
    with pytest.raises(IllegalMove, match="is running and cannot become deleting"):
        store.write(deletion.begin, FIRST, with_dataset=False)
    for _ in range(2):
        assert store.write(jobs.cancel, FIRST).state is JobState.CANCELLED
    told = [event.state for event in store.read(jobs.events, FIRST, after=0)]
    assert told[-2:] == [JobState.RUNNING, JobState.CANCELLED]  # which ends whoever follows it
    with database.reading() as tx:
        assert tx.connection.scalar(select(func.count()).where(cast(column, Text) == "{"))
        assert not tx.connection.scalar(select(func.count()).where(TASK.c.state == TaskState.LEASED))
    assert store.write(tasks.extend, [lease], TTL_S) == [lease]

    store.write(deletion.begin, FIRST, with_dataset=False)
    store.write(deletion.forget, FIRST)
    with pytest.raises(NotFound):
        store.read(jobs.state, FIRST)


def test_what_can_be_read_of_a_damaged_job_is_kept_by_its_schedule(
    two_schedules: Store, database: Store
) -> None:
    """The next run compares its recipe with that of this one."""
    made = two_schedules.write(schedules.run_now, "two").job_id
    assert made is not None
    two_schedules.write(plans.set_identity, lease_plan(two_schedules), IDENTITY)
    two_schedules.write(jobs.cancel, made)
    with database.writing() as tx:
        tx.connection.execute(update(JOB).values(problem=cast("{", Text)))
    two_schedules.write(deletion.begin, made, with_dataset=False)
    with database.reading() as tx:
        assert tx.connection.scalar(select(RUN.c.identity)) == IDENTITY


def test_a_job_that_cannot_be_read_is_deleted_by_its_age_and_keeps_no_other(
    store: Store, database: Store, clock: Clock, tmp_path: Path
) -> None:
    for number in (1, 2):
        reach(store, JobState.CANCELLED, number)
    damage(database, JOB.c.problem, JOB.c.id)
    clock.advance(2 * DAY_S)
    settings = Settings(data_dir=tmp_path, keep_jobs_days=1.0)
    assert not run_retention(LoopContext(store, settings, OWNER, Keeper(store, TTL_S)))
    states = [store.read(jobs.state, job) for job in (FIRST, SECOND)]
    assert states == [JobState.DELETING, JobState.DELETING]


@pytest.mark.parametrize("column", [JOB.c.problem, TASK.c.problem])
def test_a_job_that_cannot_be_read_keeps_no_other_from_running_again_elsewhere(
    store: Store, database: Store, column: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """1. A host has captured units of both. 2. It is lost, which is seen again and again. 3. The damaged row
    is put right."""
    store.write(hosts.register, "a" * 32, "home", is_home=True)
    far = store.write(hosts.register, "b" * 32, "far", is_home=False)
    for number in (1, 2):
        start_units(store, 1, number, "org/set")
        lease = units.lease(store, OWNER, TTL_S, host=far)
        assert lease is not None
        commit(store, lease)
    with database.writing() as tx:  # of a publishing job, the tasks are read, too
        tx.connection.execute(update(JOB).values(state=JobState.PUBLISHING))
        tx.connection.execute(update(TASK).values(state=TaskState.FAILED))
    damage(database, column, JOB.c.id if column.table is JOB else TASK.c.job_id)
    assert [store.write(hosts.forget, "b" * 32) for _ in range(3)] == [1, 0, 0]
    assert [record.name for record in caplog.records] == [hosts.__name__]
    assert store.read(jobs.job, SECOND).progress.units_done == 0
    with database.writing() as tx:
        tx.connection.execute(update(column.table).values({column: None}))
    assert store.write(hosts.forget, "b" * 32) == 1


@pytest.fixture
def two_schedules(store: Store, database: Store) -> Store:
    """Two schedules, of which the first cannot be read."""
    for name in ("one", "two"):
        source = {"kind": "file", "path": "conversations.jsonl"}
        nightly = {"name": name, "cron": "0 3 * * *", "request": {"model": "org/model", "source": source}}
        store.write(schedules.add, NewSchedule.model_validate(nightly))
    with database.writing() as tx:
        tx.connection.execute(update(SCHEDULE).where(SCHEDULE.c.name == "one").values(rules=cast("{", Text)))
    return store


def test_a_schedule_whose_rules_cannot_be_read_hides_no_other_from_the_metrics(
    two_schedules: Store, clock: Clock
) -> None:
    """If one is due, nobody can decide its slot: it is failing."""
    for seconds, failing in (0, False), (DAY_S, True):
        clock.advance(seconds)
        assert health(two_schedules) == {"one": failing, "two": False}


def health(store: Store) -> dict[str, bool]:
    return {name: is_failing for name, _, is_failing in store.read(schedules.health)}


def test_a_schedule_whose_rules_cannot_be_read_keeps_no_other_at_a_wrong_slot(
    two_schedules: Store, clock: Clock
) -> None:
    before = two_schedules.read(schedules.schedule_view, "two").next_slots[0]
    clock.advance(-10 * DAY_S)
    two_schedules.write(set_slots_right)
    assert two_schedules.read(schedules.due) == []
    clock.advance(DAY_S)
    assert two_schedules.read(schedules.due) == ["two"]
    assert two_schedules.read(schedules.schedule_view, "two").next_slots[0] < before


def test_a_schedule_whose_rules_cannot_be_read_hides_no_other_and_can_be_deleted(
    two_schedules: Store,
) -> None:
    shown = [(type(one), one.name) for one in two_schedules.read(schedules.page)]
    assert shown == [(UnreadableSchedule, "one"), (ScheduleView, "two")]
    two_schedules.write(schedules.remove, "one")
    assert [view.name for view in two_schedules.read(schedules.page)] == ["two"]


def test_a_plan_for_a_schedule_whose_rules_cannot_be_read_ends_with_their_cause(two_schedules: Store) -> None:
    number, _ = two_schedules.read(schedules.numbered, "one")
    with pytest.raises(QuarryError, match="the stored rules of schedule 'one' cannot be read"):
        two_schedules.read(captured_samples.earlier, number, FIRST, "recipe")


def test_a_schedule_whose_last_job_cannot_be_read_names_the_job(
    two_schedules: Store, database: Store
) -> None:
    made = two_schedules.write(schedules.run_now, "two")
    with database.writing() as tx:
        tx.connection.execute(update(JOB).values(problem=cast("{", Text)))
    with pytest.raises(QuarryError, match=f"of job {made.job_id} cannot be read"):
        two_schedules.read(schedules.past, "two")
    *_, shown = two_schedules.read(schedules.page)
    assert isinstance(shown, UnreadableSchedule) and str(made.job_id) in shown.problem.detail


def test_a_schedule_whose_last_job_cannot_be_read_is_in_the_metrics_and_paused_at_its_next_slot(
    two_schedules: Store, database: Store, clock: Clock, tmp_path: Path
) -> None:
    made = two_schedules.write(schedules.run_now, "two")
    with database.writing() as tx:
        tx.connection.execute(update(JOB).where(JOB.c.id == made.job_id).values(problem=cast("{", Text)))
    assert not health(two_schedules)["two"]
    clock.advance(DAY_S)
    keeper = Keeper(two_schedules, TTL_S)
    run_slots(LoopContext(two_schedules, Settings(data_dir=tmp_path), OWNER, keeper))
    *_, shown = two_schedules.read(schedules.page)
    assert isinstance(shown, ScheduleView) and shown.state is ScheduleState.PAUSED
    assert health(two_schedules)["two"]
