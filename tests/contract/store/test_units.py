"""Units: one owner an epoch, fair leases, and what an attempt's end does to the unit and to its job."""

from dataclasses import replace
from hashlib import sha256

import pytest
from sqlalchemy import delete

from schemas.job import JobState
from schemas.receipts import AttemptId
from service.errors import LeaseLost, Outcome, QuarryError, internal_error
from service.store import Store, TaskState, UnitRow, jobs, tasks, units
from service.store.tables import UNIT
from tests.support.store_cases import (
    IDENTITY,
    OWNER,
    PROBLEM,
    TTL_S,
    Clock,
    commit,
    job_id,
    lease_unit,
    planned,
    start_units,
)


def only(store: Store) -> UnitRow:
    (row,) = store.read(units.of_job, job_id(1))
    return row


def test_a_lease_says_all_that_an_attempt_needs(store: Store) -> None:
    start_units(store, units=1)
    lease = lease_unit(store)
    assert lease.attempt_id == AttemptId(job_id=job_id(1), unit=0, epoch=1)
    assert (lease.owner, lease.identity) == (OWNER, IDENTITY)
    assert (lease.num_samples, lease.num_tokens, lease.attempts) == (2, 10, 1)
    assert (lease.plan, lease.plan_sha256) == (planned(0).plan, sha256(planned(0).plan).hexdigest())
    assert only(store) == UnitRow(0, TaskState.LEASED, 1, 1, 2, 10, None)


def test_a_job_of_which_no_unit_can_be_leased_is_blocked_and_the_next_one_is_served(
    store: Store, database: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. A job's unit is gone from its table, as no verb brings about. 2. It blocks with what happened.

    3. Another worker meets that between the two.
    """
    for number in (1, 2):
        start_units(store, units=2, number=number)
    with database.writing() as tx:
        tx.connection.execute(delete(UNIT).where(UNIT.c.job_id == job_id(1)))

    def meanwhile(error: Exception) -> QuarryError:
        monkeypatch.undo()
        assert lease_unit(store, "another").job_id == job_id(2)
        return internal_error(error)

    monkeypatch.setattr(tasks, "internal_error", meanwhile)
    assert lease_unit(store).job_id == job_id(2)
    job = store.read(jobs.job, job_id(1))
    assert job.state is JobState.BLOCKED and job.problem is not None
    assert job.problem.detail.startswith("internal error: NoResultFound")


def test_the_lowest_unit_of_the_oldest_job_comes_first(store: Store) -> None:
    start_units(store, units=2, number=2)
    start_units(store, units=2, number=1)
    order = [
        (lease.attempt_id.job_id, lease.attempt_id.unit) for lease in (lease_unit(store) for _ in range(4))
    ]
    assert order == [(job_id(2), 0), (job_id(2), 1), (job_id(1), 0), (job_id(1), 1)]
    assert units.lease(store, OWNER, TTL_S) is None


def test_the_preferred_job_comes_before_older_ones_while_it_has_work(store: Store) -> None:
    start_units(store, units=2, number=1)
    start_units(store, units=1, number=2)
    assert lease_unit(store, job=job_id(2)).attempt_id.job_id == job_id(2)
    assert lease_unit(store, job=job_id(2)).attempt_id.job_id == job_id(1)
    assert lease_unit(store, job=job_id(9)).attempt_id.job_id == job_id(1)


def test_extending_returns_the_leases_that_are_lost(store: Store, clock: Clock) -> None:
    """Lost are one taken over, one of a cancelled job and one of another owner; the fourth is still ours."""
    start_units(store, units=1, number=1)
    start_units(store, units=1, number=2)
    start_units(store, units=2, number=3)
    taken = lease_unit(store)
    clock.advance(TTL_S)
    lease_unit(store, "another")
    cancelled = lease_unit(store)
    kept = lease_unit(store)
    foreign = lease_unit(store, "another")
    store.write(jobs.cancel, job_id(2))
    forged = replace(foreign, owner=OWNER)
    unknown = replace(kept, job_id=job_id(9))
    lost = store.write(tasks.extend, [forged, kept, cancelled, taken, unknown], TTL_S)
    assert {lease.attempt_id for lease in lost} == {
        one.attempt_id for one in (forged, cancelled, taken, unknown)
    }
    assert store.write(tasks.extend, [], TTL_S) == []


def test_a_failed_attempt_is_tried_again_until_the_last(store: Store) -> None:
    start_units(store, units=1)
    store.write(tasks.fail, lease_unit(store), PROBLEM, Outcome.RETRY, 2)
    assert only(store) == UnitRow(0, TaskState.PENDING, 1, 1, 2, 10, PROBLEM)
    assert store.read(jobs.state, job_id(1)) is JobState.RUNNING
    store.write(tasks.fail, lease_unit(store), PROBLEM, Outcome.RETRY, 2)
    assert only(store) == UnitRow(0, TaskState.FAILED, 2, 2, 2, 10, PROBLEM)
    job = store.read(jobs.job, job_id(1))
    assert (job.state, job.problem, job.progress.units_failed) == (JobState.FAILED, PROBLEM, 1)


def test_a_permanent_problem_fails_the_job_at_once_and_frees_its_other_units(store: Store) -> None:
    start_units(store, units=2)
    first, other = lease_unit(store), lease_unit(store, "another")
    store.write(tasks.fail, first, PROBLEM, Outcome.FAIL, 3)
    rows = store.read(units.of_job, job_id(1))
    assert [(row.state, row.attempts) for row in rows] == [(TaskState.FAILED, 1), (TaskState.PENDING, 0)]
    assert store.read(jobs.state, job_id(1)) is JobState.FAILED
    with pytest.raises(LeaseLost):
        commit(store, other)
    assert units.lease(store, OWNER, TTL_S) is None


def test_a_blocking_problem_blocks_the_job_and_does_not_count(store: Store) -> None:
    start_units(store, units=1)
    store.write(tasks.fail, lease_unit(store), PROBLEM, Outcome.BLOCK, 1)
    assert only(store) == UnitRow(0, TaskState.PENDING, 1, 0, 2, 10, PROBLEM)
    job = store.read(jobs.job, job_id(1))
    assert (job.state, job.problem, job.progress.units_failed) == (JobState.BLOCKED, PROBLEM, 0)


def test_a_commit_clears_the_problem_of_the_attempt_before(store: Store) -> None:
    start_units(store, units=1)
    store.write(tasks.fail, lease_unit(store), PROBLEM, Outcome.RETRY, 3)
    commit(store, lease_unit(store))
    assert only(store) == UnitRow(0, TaskState.DONE, 2, 2, 2, 10, None)


def test_each_move_of_a_unit_is_told(store: Store) -> None:
    start_units(store, units=1)
    known = len(store.read(jobs.events, job_id(1)))
    store.write(tasks.fail, lease_unit(store), PROBLEM, Outcome.RETRY, 3)
    commit(store, lease_unit(store))
    told = store.read(jobs.events, job_id(1), after=known)
    assert [(event.kind, event.message, event.problem) for event in told] == [
        ("unit", "unit 0: pending -> leased (epoch 1)", None),
        ("unit", "unit 0: leased -> pending (epoch 1)", PROBLEM),
        ("unit", "unit 0: pending -> leased (epoch 2)", None),
        ("unit", "unit 0: leased -> done (epoch 2)", None),
    ]
