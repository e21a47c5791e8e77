"""Workers that die without a word: counted over each unit, apart from its attempts, and bounded."""

import pytest

from schemas.job import JobState
from service.errors import LeaseLost, Outcome
from service.store import Store, TaskState, jobs, plans, tasks, units
from service.store.policies import POLICIES
from service.store.values import TaskKind, UnitLease
from tests.support.store_cases import (
    OWNER,
    PROBLEM,
    TTL_S,
    Clock,
    commit,
    job_id,
    lease_unit,
    planned,
    start_plan,
    start_units,
)

MAX_DEATHS = POLICIES[TaskKind.CAPTURE].max_deaths


def counted(store: Store) -> list[tuple[TaskState, int, int]]:
    """Return every unit's state, attempts and silent deaths."""
    return [(row.state, row.attempts, row.deaths) for row in store.read(units.of_job, job_id(1))]


def vanish(store: Store, clock: Clock, times: int, *, job: str | None = None) -> None:
    """Let workers lease a unit and never be heard of again, one after another."""
    for number in range(times):
        lease_unit(store, f"vanishes-{number}", job=job)
        clock.advance(TTL_S)


def test_a_unit_that_kills_its_workers_blocks_its_job_by_name(store: Store, clock: Clock) -> None:
    start_units(store, units=2)
    commit(store, lease_unit(store))
    vanish(store, clock, MAX_DEATHS)
    assert store.read(jobs.state, job_id(1)) is JobState.RUNNING
    assert units.lease(store, OWNER, TTL_S) is None
    job = store.read(jobs.job, job_id(1))
    assert job.state is JobState.BLOCKED and job.problem is not None
    assert f"{MAX_DEATHS} workers died without a word while they held unit 1" in job.problem.detail
    assert job.problem.cure is not None
    for word in ("memory", "kernel's log", "storage.shard_bytes", "`resume`"):
        assert word in job.problem.cure
    assert store.read(units.of_job, job_id(1))[1].problem == job.problem
    assert counted(store) == [(TaskState.DONE, 1, 0), (TaskState.PENDING, 0, MAX_DEATHS)]


def test_a_unit_that_kills_its_workers_ends_no_job_whose_units_they_held_beside_it(
    store: Store, clock: Clock
) -> None:
    """A worker holds two units at once, unless one of them is to run alone."""
    deadly, others = job_id(1), job_id(2)
    for number in (1, 2):
        start_units(store, units=1, number=number)
    while store.read(jobs.state, deadly) is not JobState.BLOCKED:
        held: list[UnitLease] = []
        while len(held) < 2 and (lease := units.lease(store, OWNER, TTL_S)) is not None:
            held.append(lease)
            if lease.runs_alone:
                break
        if deadly in {lease.job_id for lease in held}:
            clock.advance(TTL_S)
        else:
            for lease in held:
                commit(store, lease)
    assert store.read(jobs.state, others) is JobState.RUNNING
    assert store.read(jobs.job, others).progress.is_captured


@pytest.mark.parametrize("deadly", ["unit", "plan"])
def test_what_kills_its_machine_blocks_no_job_whose_plan_or_unit_was_there_too(
    store: Store, clock: Clock, deadly: str
) -> None:
    """Neither makes progress while the other kills the machine: a planner reads again what it has planned."""
    start_units(store, units=1, number=1)
    start_plan(store, number=2)
    clock.advance(TTL_S)
    guilty, other = (job_id(number) for number in ((1, 2) if deadly == "unit" else (2, 1)))
    for _ in range(200):
        unit, plan = units.lease(store, OWNER, TTL_S), plans.lease(store, OWNER, TTL_S)
        if guilty not in {lease.job_id for lease in (unit, plan) if lease is not None}:
            if unit is not None:
                commit(store, unit)
            if plan is not None:
                store.write(plans.add_unit, plan, planned(0), ())
                store.write(plans.finish, plan, ())
        clock.advance(TTL_S)
    assert store.read(jobs.state, guilty) is JobState.BLOCKED
    assert store.read(jobs.state, other) is JobState.RUNNING
    told = [event.problem.detail for event in store.read(jobs.events, job_id(2)) if event.problem is not None]
    assert told[0] == f"3 planners died without a word over this job; the next one begins in {TTL_S:.0f} s"
    progress = store.read(jobs.job, other).progress
    assert progress.plan_done if deadly == "unit" else progress.is_captured


def test_the_block_is_told_as_an_event_of_the_unit_and_one_of_the_job(store: Store, clock: Clock) -> None:
    start_units(store, units=1)
    vanish(store, clock, MAX_DEATHS)
    known = len(store.read(jobs.events, job_id(1)))
    units.lease(store, OWNER, TTL_S)
    problem = store.read(jobs.job, job_id(1)).problem
    assert [(event.message, event.problem) for event in store.read(jobs.events, job_id(1), after=known)] == [
        (f"unit 0: leased -> pending (epoch {MAX_DEATHS})", problem),
        ("running -> blocked", problem),
    ]


def test_nothing_of_a_blocked_job_can_be_committed(store: Store, clock: Clock) -> None:
    """The last worker over the unit was slow and not dead, and another one holds the job's second unit."""
    start_units(store, units=2)
    vanish(store, clock, MAX_DEATHS - 1)
    slow = lease_unit(store, "slow")
    clock.advance(TTL_S / 2)
    other = lease_unit(store, "other")
    clock.advance(TTL_S / 2)
    assert units.lease(store, OWNER, TTL_S) is None
    for lease in (slow, other):
        with pytest.raises(LeaseLost):
            commit(store, lease)
    assert counted(store) == [(TaskState.PENDING, 0, MAX_DEATHS), (TaskState.PENDING, 0, 0)]


def test_a_resume_forgets_the_deaths_over_units_that_failed_and_over_those_that_wait(
    store: Store, clock: Clock
) -> None:
    start_units(store, units=2)
    for owner in ("first", "second"):
        lease_unit(store, owner)
    clock.advance(TTL_S)
    lease_unit(store)
    failing = lease_unit(store)
    store.write(tasks.fail, failing, PROBLEM, Outcome.FAIL, 3)
    assert counted(store) == [(TaskState.PENDING, 0, 1), (TaskState.FAILED, 1, 1)]
    store.write(jobs.resume, job_id(1))
    assert counted(store) == [(TaskState.PENDING, 0, 0)] * 2


def test_a_unit_given_back_in_order_counts_no_death_however_often(store: Store, clock: Clock) -> None:
    """Each worker drains past the end of its lease, which nobody takes meanwhile, and gives the unit back."""
    start_units(store, units=1)
    for _ in range(MAX_DEATHS + 1):
        lease = lease_unit(store)
        clock.advance(TTL_S)
        store.write(tasks.release, lease)
    assert counted(store) == [(TaskState.PENDING, 0, 0)]
    assert store.read(jobs.state, job_id(1)) is JobState.RUNNING


def test_a_cancel_voids_a_lease_that_ran_out_without_a_death(store: Store, clock: Clock) -> None:
    start_units(store, units=1)
    vanish(store, clock, 1)
    store.write(jobs.cancel, job_id(1))
    assert counted(store) == [(TaskState.PENDING, 0, 0)]
