"""Schedules on simulated time: which slots become jobs, and what is said of the others."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import update

from schemas.job import JobState
from schemas.schedule import NewSchedule, RunOutcome, ScheduleChange, ScheduleState
from service.control import scheduling
from service.errors import Conflict, NotFound, QuotaExceeded
from service.settings import Settings
from service.store import Store, deletion, jobs, runs, schedules
from service.store.tables import JOB
from tests.support.store_cases import PROBLEM, ROOMY, Clock, stop_job

REQUEST = {"model": "org/model", "source": {"kind": "file", "path": "conversations.jsonl"}}
HOUR_S = 3600
NOW = datetime.fromtimestamp(1_800_000_000, UTC)
"""2027-01-15 08:00, when each test begins."""


def at(hour: int, minute: int = 0) -> datetime:
    return NOW.replace(hour=hour, minute=minute)


def schedule(name: str = "hourly", cron: str = "0 * * * *", **values: Any) -> NewSchedule:
    return NewSchedule.model_validate({"name": name, "cron": cron, "request": REQUEST, **values})


def look(store: Store, settings: Settings = ROOMY) -> None:
    """Do what any service does now and then."""
    scheduling.submit_due(store, settings)


def end_jobs(store: Store, state: JobState = JobState.COMPLETED) -> None:
    with store.writing() as tx:
        tx.connection.execute(update(JOB).values(state=state))


def outcomes(store: Store, name: str = "hourly") -> list[tuple[datetime, RunOutcome]]:
    """Return what became of the slots that have passed, oldest first."""
    return [(run.slot, run.outcome) for run in reversed(store.read(schedules.past, name, limit=1000))]


def submitted(store: Store) -> list[datetime]:
    return [slot for slot, outcome in outcomes(store) if outcome is RunOutcome.SUBMITTED]


def test_a_slot_becomes_a_job_when_its_time_comes_and_once(store: Store, clock: Clock) -> None:
    view = store.write(schedules.add, schedule())
    assert view.next_slots == tuple(at(hour) for hour in (9, 10, 11, 12, 13))
    assert (view.state, view.last_run, view.waiting_slot) == (ScheduleState.ACTIVE, None, None)
    clock.advance(HOUR_S - 1)
    look(store)
    assert outcomes(store) == []
    clock.advance(1)
    look(store)
    look(store)
    assert outcomes(store) == [(at(9), RunOutcome.SUBMITTED)]
    (job,), _ = store.read(jobs.page)
    run = store.read(schedules.schedule_view, "hourly").last_run
    assert run is not None and (run.job_id, run.job_state) == (job.id, JobState.QUEUED)
    assert store.read(jobs.request, job.id) == schedule().request


def test_a_name_is_given_once(store: Store) -> None:
    store.write(schedules.add, schedule())
    with pytest.raises(Conflict, match="hourly") as caught:
        store.write(schedules.add, schedule(cron="1 * * * *"))
    assert caught.value.field == "name"


def test_an_owner_has_so_many_schedules_and_the_operator_any_number(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedules, "MAX_OF_OWNER", 2)
    for owner in ("a", None):
        for number in range(2):
            store.write(schedules.add, schedule(name=f"{owner}-{number}".lower()), owner)
    with pytest.raises(QuotaExceeded):
        store.write(schedules.add, schedule(name="more"), "a")
    for owner in ("b", None):
        store.write(schedules.add, schedule(name=f"{owner}-more".lower()), owner)


@pytest.mark.parametrize(
    ("missed", "expected"),
    [("skip", []), ("once", [at(12)]), ("all", [at(9), at(10), at(11), at(12)])],
)
def test_of_slots_that_nobody_saw_the_rules_choose(
    store: Store, clock: Clock, missed: str, expected: list[datetime]
) -> None:
    """1. No service runs until half past twelve. 2. The slot after that is as any other."""
    store.write(schedules.add, schedule(missed=missed, overlap="replace"))
    clock.advance(4.5 * HOUR_S)
    look(store)
    assert submitted(store) == expected
    end_jobs(store)
    clock.advance(HOUR_S / 2)
    look(store)
    assert submitted(store) == [*expected, at(13)]


def test_a_slot_that_is_seen_a_little_late_is_not_missed(store: Store, clock: Clock) -> None:
    store.write(schedules.add, schedule(missed="skip"))
    clock.advance(HOUR_S + 290)
    look(store)
    assert submitted(store) == [at(9)]


def test_years_of_missed_minutes_are_one_record(store: Store, clock: Clock) -> None:
    store.write(schedules.add, schedule(cron="* * * * *"))
    clock.advance(3 * 365 * 24 * HOUR_S)
    look(store)
    assert [outcome for _, outcome in outcomes(store)] == [RunOutcome.MISSED, RunOutcome.SUBMITTED]


def test_skip_passes_over_slots_while_a_job_goes_on(store: Store, clock: Clock) -> None:
    store.write(schedules.add, schedule(overlap="skip"))
    for _ in range(3):
        clock.advance(HOUR_S)
        look(store)
    assert [outcome for _, outcome in outcomes(store)] == ["submitted", "skipped", "skipped"]
    end_jobs(store)
    clock.advance(HOUR_S)
    look(store)
    assert submitted(store) == [at(9), at(12)]


@pytest.mark.parametrize("state", [JobState.RUNNING, JobState.BLOCKED, JobState.PAUSED])
def test_queue_lets_the_last_slot_wait_for_the_end(store: Store, clock: Clock, state: JobState) -> None:
    """A job that waits for a person has not ended."""
    store.write(schedules.add, schedule(overlap="queue"))
    for _ in range(3):
        clock.advance(HOUR_S)
        look(store)
        end_jobs(store, state)
    assert submitted(store) == [at(9)]
    assert store.read(schedules.schedule_view, "hourly").waiting_slot == at(11)
    end_jobs(store)
    look(store)
    assert outcomes(store) == [
        (at(9), RunOutcome.SUBMITTED),
        (at(10), RunOutcome.SKIPPED),
        (at(11), RunOutcome.SUBMITTED),
    ]


def test_queue_with_all_runs_each_slot_one_after_another(store: Store, clock: Clock) -> None:
    store.write(schedules.add, schedule(overlap="queue", missed="all"))
    clock.advance(3 * HOUR_S)
    for done in range(1, 4):
        look(store)
        assert submitted(store) == [at(9), at(10), at(11)][:done]
        end_jobs(store)
    look(store)
    assert len(outcomes(store)) == 3


def test_replace_cancels_the_job_that_goes_on(store: Store, clock: Clock) -> None:
    store.write(schedules.add, schedule(overlap="replace"))
    for _ in range(2):
        clock.advance(HOUR_S)
        look(store)
    runs = store.read(schedules.past, "hourly")
    assert [run.job_state for run in runs] == [JobState.QUEUED, JobState.CANCELLED]


def test_a_schedule_ends(store: Store, clock: Clock) -> None:
    store.write(schedules.add, schedule(ends_at=at(10), overlap="replace"))
    for _ in range(4):
        clock.advance(HOUR_S)
        look(store)
    assert submitted(store) == [at(9), at(10)]
    assert store.read(schedules.schedule_view, "hourly").state is ScheduleState.ENDED


def test_a_clock_that_is_set_back_runs_no_slot_again(store: Store, clock: Clock) -> None:
    store.write(schedules.add, schedule())
    clock.advance(HOUR_S)
    look(store)
    end_jobs(store)
    clock.advance(-HOUR_S)
    look(store)
    clock.advance(HOUR_S)
    look(store)
    assert submitted(store) == [at(9)]


def test_a_job_can_be_made_at_any_time(store: Store, clock: Clock) -> None:
    store.write(schedules.add, schedule())
    run = store.write(schedules.run_now, "hourly")
    assert (run.slot, run.job_state) == (NOW, JobState.QUEUED)
    with pytest.raises(Conflict, match=str(run.job_id)):
        store.write(schedules.run_now, "hourly")
    end_jobs(store)
    clock.advance(HOUR_S)
    look(store)
    assert submitted(store) == [NOW, at(9)]


def test_a_schedule_that_is_deleted_and_made_again_makes_jobs_of_its_own(store: Store, clock: Clock) -> None:
    store.write(schedules.add, schedule())
    clock.advance(HOUR_S)
    look(store)
    store.write(schedules.remove, "hourly")
    with pytest.raises(NotFound):
        store.read(schedules.schedule_view, "hourly")
    clock.advance(-HOUR_S)
    store.write(schedules.add, schedule())
    clock.advance(HOUR_S)
    look(store)
    assert submitted(store) == [at(9)]
    assert len(store.read(jobs.page)[0]) == 2


def test_what_was_meant_for_a_deleted_schedule_is_not_done_to_the_next_of_its_name(store: Store) -> None:
    store.write(schedules.add, schedule(), "ann")
    number, _ = store.read(schedules.numbered, "hourly")
    store.write(schedules.remove, number)
    store.write(schedules.add, schedule(), "bob")
    before = store.read(schedules.schedule_view, "hourly")
    for verb in (schedules.remove, schedules.run_now, schedules.request_json, schedules.past):
        with pytest.raises(NotFound):
            store.write(verb, number)
    with pytest.raises(NotFound):
        scheduling.change(store, ROOMY, number, ScheduleChange(paused=True))
    assert store.read(schedules.schedule_view, "hourly") == before


def test_a_run_says_what_its_job_wrote_and_why_it_failed(store: Store, clock: Clock) -> None:
    store.write(schedules.add, schedule())
    clock.advance(HOUR_S)
    look(store)
    run = store.read(schedules.past, "hourly")[0]
    assert (run.samples_written, run.samples_rejected, run.detail) == (0, 0, None)
    stop_job(store, str(run.job_id), JobState.BLOCKED, PROBLEM)
    run = store.read(schedules.past, "hourly")[0]
    assert (run.job_state, run.detail) == (JobState.BLOCKED, PROBLEM.detail)


def test_the_last_good_run_is_known_also_when_its_job_is_deleted(store: Store, clock: Clock) -> None:
    """1. A job is completed. 2. The next one fails. 3. Both are deleted."""
    store.write(schedules.add, schedule())
    assert store.read(schedules.schedule_view, "hourly").last_good_at is None
    for state in (JobState.COMPLETED, JobState.FAILED):
        clock.advance(HOUR_S)
        look(store)
        run = store.read(schedules.schedule_view, "hourly").last_run
        assert run is not None
        with store.writing() as tx:
            tx.connection.execute(update(JOB).where(JOB.c.id == run.job_id).values(state=state))
    before = store.read(schedules.schedule_view, "hourly")
    assert (before.last_good_at, before.failing) == (at(9), True)
    for run in store.read(schedules.past, "hourly"):
        store.write(deletion.begin, str(run.job_id), with_dataset=False)
        store.write(deletion.forget, str(run.job_id))
    assert store.read(jobs.page)[0] == []
    assert before.last_run is not None
    gone = before.last_run.model_copy(update={"samples_written": None, "samples_rejected": None})
    after = store.read(schedules.schedule_view, "hourly")
    assert after == before.model_copy(update={"last_run": gone})


def test_what_is_noted_of_a_job_that_has_ended_makes_its_run_no_later(store: Store, clock: Clock) -> None:
    """Otherwise a schedule that fails for days would look as if it had just completed."""
    store.write(schedules.add, schedule())
    clock.advance(HOUR_S)
    look(store)
    end_jobs(store)
    run = store.read(schedules.schedule_view, "hourly").last_run
    assert run is not None
    clock.advance(HOUR_S)
    store.write(jobs.note, str(run.job_id), PROBLEM)
    assert store.read(jobs.events, str(run.job_id))[-1].problem == PROBLEM
    assert store.read(schedules.schedule_view, "hourly").last_good_at == at(9)


@pytest.mark.parametrize(
    ("state", "failing"),
    [
        (JobState.QUEUED, False),
        (JobState.COMPLETED, False),
        (JobState.PAUSED, False),
        (JobState.FAILED, True),
        (JobState.BLOCKED, True),
        (JobState.CANCELLED, True),
    ],
)
def test_a_schedule_is_failing_by_the_job_of_its_last_slot(
    store: Store, clock: Clock, state: JobState, failing: bool
) -> None:
    store.write(schedules.add, schedule())
    clock.advance(HOUR_S)
    look(store)
    end_jobs(store, state)
    assert store.read(schedules.schedule_view, "hourly").failing is failing


def test_a_slot_without_a_job_is_a_failure_unless_it_was_to_be_skipped(store: Store, clock: Clock) -> None:
    for name, rules in (("missed", {"missed": "skip"}), ("skipped", {"overlap": "skip"})):
        store.write(schedules.add, schedule(name, **rules))
    clock.advance(HOUR_S)
    look(store)
    clock.advance(HOUR_S + 600)
    look(store)
    failing = {view.name: view.failing for view in store.read(schedules.page)}
    assert failing == {"missed": True, "skipped": False}
    latest = {name: store.read(schedules.past, name)[0].outcome for name in failing}
    assert latest == {"missed": RunOutcome.MISSED, "skipped": RunOutcome.SKIPPED}


@pytest.mark.parametrize("overlap", ["skip", "queue"])
@pytest.mark.parametrize(("state", "failing"), [(JobState.BLOCKED, True), (JobState.RUNNING, False)])
def test_a_schedule_whose_job_is_blocked_keeps_failing_while_later_slots_are_skipped(
    store: Store, clock: Clock, overlap: str, state: JobState, failing: bool
) -> None:
    store.write(schedules.add, schedule(overlap=overlap))
    for _ in range(4):
        clock.advance(HOUR_S)
        look(store)
        end_jobs(store, state)
    assert store.read(schedules.past, "hourly")[0].outcome is RunOutcome.SKIPPED
    assert store.read(schedules.schedule_view, "hourly").failing is failing
    assert [is_failing for _, _, is_failing in store.read(schedules.health)] == [failing]


@pytest.mark.parametrize(("state", "failing"), [(JobState.FAILED, True), (JobState.RUNNING, False)])
def test_a_job_that_went_on_while_slots_were_missed_says_whether_its_schedule_fails(
    store: Store, clock: Clock, state: JobState, failing: bool
) -> None:
    """1. A job begins. 2. No worker looks for three slots: the last one is skipped, the others missed."""
    store.write(schedules.add, schedule(overlap="skip"))
    for num_slots in (1, 3):
        clock.advance(num_slots * HOUR_S)
        look(store)
    assert [outcome for _, outcome in outcomes(store)][1:] == [RunOutcome.MISSED, RunOutcome.SKIPPED]
    end_jobs(store, state)
    assert store.read(schedules.schedule_view, "hourly").failing is failing


def test_a_schedule_whose_slots_pass_without_a_worker_is_failing_until_one_looks(
    store: Store, clock: Clock
) -> None:
    for name in ("hourly", "paused"):
        store.write(schedules.add, schedule(name))
    scheduling.change(store, ROOMY, "paused", ScheduleChange(paused=True))
    for failing in (False, True, True):
        clock.advance(HOUR_S)
        assert [view.failing for view in store.read(schedules.page)] == [failing, False]
        assert [is_failing for *_, is_failing in sorted(store.read(schedules.health))] == [failing, False]
    look(store)
    assert [view.failing for view in store.read(schedules.page)] == [False, False]


def test_old_slots_are_forgotten_but_not_what_is_known_by_them(
    store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. Of three jobs, all deleted, the first two were completed. 2. Another goes on, and slots are skipped.

    The newest slots are kept; of older ones the last good run, and that of a job which is there.
    """
    monkeypatch.setattr(runs, "RUNS_KEPT", 3)
    store.write(schedules.add, schedule(overlap="skip"))
    for state in (JobState.COMPLETED, JobState.COMPLETED, JobState.FAILED):
        clock.advance(HOUR_S)
        look(store)
        end_jobs(store, state)
        job = store.read(jobs.page)[0][0].id
        store.write(deletion.begin, job, with_dataset=False)
        store.write(deletion.forget, job)
    for _ in range(8):
        clock.advance(HOUR_S)
        look(store)
    kept = {slot.hour: outcome for slot, outcome in outcomes(store)}
    made, skipped = RunOutcome.SUBMITTED, RunOutcome.SKIPPED
    assert kept == {10: made, 12: made, 17: skipped, 18: skipped, 19: skipped}
    assert store.read(schedules.schedule_view, "hourly").last_good_at == at(10)


def test_lists_come_in_pages(store: Store, clock: Clock) -> None:
    for name in ("b", "a", "c"):
        store.write(schedules.add, schedule(name, overlap="replace"))
    assert [view.name for view in store.read(schedules.page, limit=2)] == ["a", "b"]
    assert [view.name for view in store.read(schedules.page, after="b")] == ["c"]
    for _ in range(3):
        clock.advance(HOUR_S)
        look(store)
    first = store.read(schedules.past, "a", limit=2)
    rest = store.read(schedules.past, "a", before=first[-1].slot)
    assert [run.slot for run in (*first, *rest)] == [at(11), at(10), at(9)]
    assert all(run.at - run.slot < timedelta(seconds=1) for run in first)
