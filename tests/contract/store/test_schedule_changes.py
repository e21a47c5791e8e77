"""Schedules that are changed, and slots that are refused: none is lost, and the others go on."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy import text, update

from schemas.job import JobState
from schemas.keys import NewKey, Scope
from schemas.schedule import RunOutcome, ScheduleChange, ScheduleState, ScheduleView
from service.control import scheduling
from service.errors import StoreUnavailable
from service.store import Store, commits, jobs, keys, plans, schedules
from service.store.schedule_tables import SCHEDULE, SCHEDULE_REQUEST
from service.store.tables import JOB
from tests.contract.store.test_schedules import HOUR_S, at, end_jobs, look, outcomes, schedule, submitted
from tests.support.store_cases import IDENTITY, ROOMY, Clock, lease_plan, lease_unit, made, planned, stop_job


def change(store: Store, **given: Any) -> ScheduleView:
    return scheduling.change(store, ROOMY, "hourly", ScheduleChange.model_validate(given))


def test_a_pause_misses_nothing_and_runs_nothing(store: Store, clock: Clock) -> None:
    """1. Paused at half past eight. 2. Active again at half past twelve."""
    store.write(schedules.add, schedule(missed="all"))
    clock.advance(HOUR_S / 2)
    paused = change(store, paused=True)
    assert (paused.state, paused.next_slots) == (ScheduleState.PAUSED, ())
    clock.advance(4 * HOUR_S)
    look(store)
    change(store, paused=False)
    look(store)
    assert outcomes(store) == []
    clock.advance(HOUR_S / 2)
    look(store)
    assert outcomes(store) == [(at(13), RunOutcome.SUBMITTED)]


def test_a_slot_that_waits_is_missed_by_a_pause_and_comes_at_no_later_time(
    store: Store, clock: Clock
) -> None:
    """1. The job of nine goes on, so ten waits. 2. A pause. 3. The job ends. 4. The pause ends."""
    store.write(schedules.add, schedule(overlap="queue"))
    for _ in range(2):
        clock.advance(HOUR_S)
        look(store)
    assert store.read(schedules.schedule_view, "hourly").waiting_slot == at(10)
    assert change(store, paused=True).waiting_slot is None
    end_jobs(store)
    clock.advance(HOUR_S / 2)
    change(store, paused=False)
    look(store)
    assert outcomes(store) == [(at(9), RunOutcome.SUBMITTED), (at(10), RunOutcome.MISSED)]


@pytest.mark.parametrize(
    ("overlap", "then"), [("skip", RunOutcome.SKIPPED), ("replace", RunOutcome.SUBMITTED)]
)
def test_a_slot_that_waited_is_not_forgotten_if_slots_no_longer_wait(
    store: Store, clock: Clock, overlap: str, then: RunOutcome
) -> None:
    """1. The job of nine goes on, so ten waits. 2. Another `overlap`. 3. Eleven comes."""
    store.write(schedules.add, schedule(overlap="queue"))
    for _ in range(2):
        clock.advance(HOUR_S)
        look(store)
    assert change(store, overlap=overlap).waiting_slot == at(10)
    clock.advance(HOUR_S)
    look(store)
    told = [(at(9), RunOutcome.SUBMITTED), (at(10), RunOutcome.SKIPPED), (at(11), then)]
    assert outcomes(store) == told


def test_a_schedule_whose_last_slot_waits_has_not_ended(store: Store, clock: Clock) -> None:
    store.write(schedules.add, schedule(overlap="queue", ends_at=at(10)))
    for _ in range(2):
        clock.advance(HOUR_S)
        look(store)
    view = store.read(schedules.schedule_view, "hourly")
    assert (view.state, view.waiting_slot, view.next_slots) == (ScheduleState.ACTIVE, at(10), ())
    end_jobs(store)
    look(store)
    assert submitted(store) == [at(9), at(10)]
    assert store.read(schedules.schedule_view, "hourly").state is ScheduleState.ENDED


def test_other_times_count_from_now(store: Store, clock: Clock) -> None:
    store.write(schedules.add, schedule())
    clock.advance(HOUR_S / 2)
    view = change(store, cron="15 * * * *")
    assert view.next_slots[0] == at(9, 15)
    look(store)
    assert outcomes(store) == []


@pytest.mark.parametrize(
    ("changes", "at_once", "in_the_end"),
    [
        ({"missed": "all"}, [], [(at(9), RunOutcome.SUBMITTED)]),
        ({"missed": "skip"}, [], [(at(9), RunOutcome.MISSED)]),
        ({"cron": "15 * * * *"}, [(at(9), RunOutcome.SUBMITTED)], [(at(9), RunOutcome.SUBMITTED)]),
        ({"ends_at": at(9)}, [(at(9), RunOutcome.SUBMITTED)], [(at(9), RunOutcome.SUBMITTED)]),
        ({"paused": True}, [(at(9), RunOutcome.MISSED)], [(at(9), RunOutcome.MISSED)]),
    ],
)
def test_a_slot_that_has_come_is_not_lost_to_a_change(
    store: Store, clock: Clock, changes: dict[str, Any], at_once: object, in_the_end: object
) -> None:
    """A slot has come, and nobody has looked yet: what becomes of it is decided and recorded."""
    store.write(schedules.add, schedule())
    clock.advance(HOUR_S + 600)
    change(store, **changes)
    assert outcomes(store) == at_once
    look(store)
    assert outcomes(store) == in_the_end


def test_slots_that_wait_behind_another_are_missed_when_the_times_change(store: Store, clock: Clock) -> None:
    """1. A job goes on while three slots come; the first of them waits. 2. Other times are given."""
    store.write(schedules.add, schedule(missed="all"))
    for _ in range(4):
        clock.advance(HOUR_S)
        look(store)
    change(store, cron="15 * * * *")
    assert outcomes(store) == [(at(9), RunOutcome.SUBMITTED), (at(11), RunOutcome.MISSED)]
    end_jobs(store)
    look(store)
    assert submitted(store) == [at(9), at(10)]


def test_changes_at_once_are_all_made(store: Store) -> None:
    store.write(schedules.add, schedule())
    changes = [{"missed": "all"}, {"overlap": "skip"}, {"samples": "all"}, {"cron": "5 * * * *"}]
    with ThreadPoolExecutor(len(changes)) as pool:
        list(pool.map(lambda given: change(store, **given), changes))
    view = store.read(schedules.schedule_view, "hourly")
    given = {name: value for one in changes for name, value in one.items()}
    assert {name: getattr(view, name) for name in given} == given


def test_a_slot_that_comes_again_after_a_change_is_the_same_job(store: Store, clock: Clock) -> None:
    """1. A slot is run. 2. The clock is set back, and the rules are given anew. 3. The slot comes again."""
    store.write(schedules.add, schedule())
    clock.advance(HOUR_S)
    look(store)
    clock.advance(-HOUR_S)
    change(store, ends_at=at(12))
    end_jobs(store)
    clock.advance(HOUR_S)
    look(store)
    assert submitted(store) == [at(9)]
    assert len(store.read(jobs.page)[0]) == 1


def test_a_request_that_this_version_refuses_is_said_and_the_schedule_goes_on(
    store: Store, clock: Clock
) -> None:
    store.write(schedules.add, schedule())
    with store.writing() as tx:
        tx.connection.execute(update(SCHEDULE_REQUEST).values(body='{"model": 7}'))
    clock.advance(HOUR_S)
    look(store)
    run = store.read(schedules.schedule_view, "hourly").last_run
    assert run is not None and run.outcome is RunOutcome.REFUSED and "model" in str(run.detail)
    assert store.read(schedules.due) == []


def test_a_schedule_that_cannot_be_decided_on_is_paused_and_the_others_go_on(
    store: Store, clock: Clock
) -> None:
    """The job that its slot would wait for cannot be read, which nobody foresaw."""
    for name in ("broken", "hourly"):
        store.write(schedules.add, schedule(name))
    clock.advance(HOUR_S)
    look(store)
    broken = store.read(schedules.past, "broken")[0].job_id
    with store.writing() as tx:
        tx.connection.execute(update(JOB).where(JOB.c.id == broken).values(problem=text("'{}'")))
        tx.connection.execute(update(SCHEDULE).values(last_job=broken).where(SCHEDULE.c.name == "broken"))
    end_jobs(store)
    clock.advance(HOUR_S)
    look(store)
    assert submitted(store) == [at(9), at(10)]
    view = store.read(schedules.schedule_view, "broken")
    assert (view.state, view.failing) == (ScheduleState.PAUSED, True)
    assert view.last_run is not None and view.last_run.outcome is RunOutcome.REFUSED
    assert "problem" in str(view.last_run.detail).lower()


def a_key(store: Store, **limits: Any) -> None:
    new = NewKey.model_validate({"name": "team", "scopes": [Scope.SCHEDULES, Scope.JOBS_WRITE], **limits})
    store.write(keys.add, "k1", "0" * 64, new)


def capture_one_of_two(store: Store, job: str) -> None:
    lease = lease_plan(store)
    assert lease.job_id == job
    store.write(plans.set_identity, lease, IDENTITY)
    for unit in range(2):
        store.write(plans.add_unit, lease, planned(unit), ())
    store.write(plans.finish, lease, ())
    unit = lease_unit(store, job=job)
    store.write(commits.commit, made(unit), unit)


@pytest.mark.parametrize(("overlap", "fails"), [("queue", True), ("replace", False), ("replace", True)])
def test_a_key_of_one_job_is_enough_for_a_schedule(
    store: Store, clock: Clock, overlap: str, fails: bool
) -> None:
    """1. A job has written something, and goes on or failed. 2. The next slot comes.

    3. What was written is published, and the slot's job is made: what ends by it is not counted.
    """
    a_key(store, max_jobs=1)
    store.write(schedules.add, schedule(overlap=overlap), "team")
    clock.advance(HOUR_S)
    look(store)
    (first,) = store.read(jobs.page)[0]
    capture_one_of_two(store, first.id)
    if fails:
        stop_job(store, first.id, JobState.FAILED)
    clock.advance(HOUR_S)
    look(store)
    assert outcomes(store) == [(at(9), RunOutcome.CUT_SHORT), (at(10), RunOutcome.SUBMITTED)]
    assert [row.state for row in store.read(jobs.page)[0]] == [JobState.QUEUED, JobState.QUEUED]


def test_a_slot_that_is_refused_leaves_the_job_before_it_alone(store: Store, clock: Clock) -> None:
    a_key(store)
    store.write(schedules.add, schedule(overlap="replace"), "team")
    clock.advance(HOUR_S)
    look(store)
    store.write(keys.revoke, "k1")
    clock.advance(HOUR_S)
    look(store)
    assert outcomes(store) == [(at(9), RunOutcome.SUBMITTED), (at(10), RunOutcome.REFUSED)]
    assert [row.state for row in store.read(jobs.page)[0]] == [JobState.QUEUED]


def test_a_slot_for_which_there_is_no_room_is_refused_and_the_next_comes_at_its_time(
    store: Store, clock: Clock
) -> None:
    """1. A slot becomes a job, and the next one waits for its end. 2. The disk is full: it is refused, as is
    the one after it, also where other times are given before anybody looks. 3. There is room again."""
    full = ROOMY.model_copy(update={"min_free_bytes": 2**62})
    store.write(schedules.add, schedule())
    for _ in range(2):
        clock.advance(HOUR_S)
        look(store)
    end_jobs(store)
    look(store, full)
    assert store.read(schedules.due) == []
    clock.advance(HOUR_S)
    scheduling.change(store, full, "hourly", ScheduleChange(cron="0 * * * 1-7"))
    assert outcomes(store) == [
        (at(9), RunOutcome.SUBMITTED),
        (at(10), RunOutcome.REFUSED),
        (at(11), RunOutcome.REFUSED),
    ]
    view = store.read(schedules.schedule_view, "hourly")
    assert (view.state, view.failing, view.waiting_slot) == (ScheduleState.ACTIVE, True, None)
    assert view.last_run is not None and f"{2**62} must be" in str(view.last_run.detail)
    clock.advance(HOUR_S)
    look(store)
    assert submitted(store) == [at(9), at(12)]


def test_a_slot_waits_where_the_data_folder_cannot_be_looked_at(store: Store, clock: Clock) -> None:
    gone = ROOMY.model_copy(update={"data_dir": ROOMY.data_dir / "not-there"})
    store.write(schedules.add, schedule())
    clock.advance(HOUR_S)
    with pytest.raises(StoreUnavailable):
        look(store, gone)
    assert outcomes(store) == []
    look(store)
    assert submitted(store) == [at(9)]


def test_a_worker_away_from_the_data_folder_sees_a_slot_and_leaves_it(store: Store, clock: Clock) -> None:
    store.write(schedules.add, schedule())
    assert not store.read(schedules.due)
    clock.advance(HOUR_S)
    assert store.read(schedules.due)
    assert (outcomes(store), store.read(jobs.page)[0]) == ([], [])
    look(store)
    assert not store.read(schedules.due)
