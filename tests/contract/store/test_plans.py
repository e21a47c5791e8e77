"""Planning: one planner a job, units added once, the identity fixed, every reject counted."""

from functools import partial

import pytest
from sqlalchemy import update

from schemas.job import JobState
from schemas.keys import NewKey, Scope
from service.errors import IdentityChanged, LeaseLost, QuotaExceeded, SourceRefused
from service.store import NewJob, PlannedUnit, Store, TaskState, commits, jobs, keys, plans, units
from service.store.policies import POLICIES
from service.store.tables import JOB
from service.store.values import TaskKind
from tests.support.store_cases import (
    IDENTITY,
    OWNER,
    TTL_S,
    Clock,
    a_request,
    job_id,
    lease_plan,
    lease_unit,
    planned,
    reject,
    start_plan,
    start_units,
    submit,
)

MAX_DEATHS = POLICIES[TaskKind.PLAN].max_deaths


def test_the_oldest_job_is_planned_first(store: Store) -> None:
    for number in (2, 1, 3):
        submit(store, number)
    assert [lease_plan(store).job_id for _ in range(3)] == [job_id(2), job_id(1), job_id(3)]
    assert plans.lease(store, OWNER, TTL_S) is None


def test_owners_are_planned_in_turns_within_a_priority(store: Store, clock: Clock) -> None:
    for name in ("a", "b"):
        store.write(keys.add, f"{name:0>8}", "0" * 64, NewKey(name=name, scopes=(Scope.JOBS_WRITE,)))
    for number, owner in enumerate(["a", "a", "a", None, None, "b", "b"], 1):
        store.write(jobs.submit, NewJob.of(job_id(number), f"key-{number}", a_request(), owner=owner))
    store.write(jobs.set_priority, job_id(3), 1)
    turns = [lease_plan(store).job_id for _ in range(5)]
    assert turns == [job_id(number) for number in (3, 4, 6, 1, 2)]
    clock.advance(TTL_S + 1)  # none of them is planned any more
    store.write(jobs.cancel, job_id(3))
    assert [lease_plan(store).job_id for _ in range(3)] == [job_id(number) for number in (1, 4, 6)]


def test_units_can_be_leased_while_planning_goes_on(store: Store) -> None:
    lease = start_plan(store)
    store.write(plans.add_unit, lease, planned(0), ())
    unit = units.lease(store, OWNER, TTL_S)
    assert unit is not None
    assert unit.attempt_id.unit == 0
    store.write(plans.add_unit, lease, planned(1), ())
    assert [row.state for row in store.read(units.of_job, job_id(1))] == [TaskState.LEASED, TaskState.PENDING]


def test_a_plan_counts_units_samples_tokens_and_rejects(store: Store) -> None:
    lease = start_plan(store)
    store.write(plans.add_unit, lease, planned(0, 3), (reject(1), reject(4)))
    store.write(plans.add_unit, lease, planned(1, 2), ())
    store.write(plans.finish, lease, (reject(7),))
    progress = store.read(jobs.job, job_id(1)).progress
    assert progress.plan_done
    assert (progress.units_planned, progress.samples_planned, progress.samples_rejected) == (2, 8, 3)
    assert (progress.tokens_planned, progress.samples_written) == (25, 0)
    assert store.read(commits.rejects, job_id(1)) == [reject(1), reject(4), reject(7)]


def test_the_same_unit_planned_again_changes_nothing(store: Store, clock: Clock) -> None:
    first = start_plan(store)
    store.write(plans.add_unit, first, planned(0), (reject(5),))
    before = (
        store.read(jobs.job, job_id(1)),
        store.read(jobs.events, job_id(1)),
        store.read(commits.rejects, job_id(1)),
    )
    clock.advance(TTL_S)
    second = lease_plan(store, "another")
    store.write(plans.set_identity, second, IDENTITY)
    store.write(plans.add_unit, second, planned(0), (reject(5),))
    assert (
        store.read(jobs.job, job_id(1)),
        store.read(jobs.events, job_id(1)),
        store.read(commits.rejects, job_id(1)),
    ) == before


def test_rejects_without_a_unit_are_counted_once(store: Store, clock: Clock) -> None:
    lease = start_plan(store)
    for again in range(2):
        store.write(plans.add_rejected, lease, (reject(1), reject(4)), 3)
        progress = store.read(jobs.job, job_id(1)).progress
        assert (progress.samples_planned, progress.samples_rejected, progress.samples_known) == (2, 2, 3)
        clock.advance(TTL_S)
        lease, ended = lease_plan(store, f"another {again}"), lease
        with pytest.raises(LeaseLost):
            store.write(plans.add_rejected, ended, (reject(5),), 0)
    assert store.read(commits.rejects, job_id(1)) == [reject(1), reject(4)]


def test_rejects_count_in_max_bytes_however_they_are_planned(store: Store) -> None:
    """A source of other rows, or one that is read forever, filled the database of everybody."""
    lease = start_plan(store)
    with store.writing() as tx:
        tx.connection.execute(update(JOB).values(owner="ann", request_bytes=0))
    limited = NewKey(name="ann", scopes=(Scope.JOBS_WRITE,), max_bytes=2 * keys.REJECT_BYTES)
    store.write(keys.add, "k-1", "0" * 64, limited)
    for position in (1, 2):
        store.write(plans.add_rejected, lease, (reject(position),), 0)
    for write in (
        partial(store.write, plans.add_rejected, lease, (reject(3),), 0),
        partial(store.write, plans.add_unit, lease, planned(0), (reject(3),)),
        partial(store.write, plans.finish, lease, (reject(3),)),
    ):
        with pytest.raises(QuotaExceeded, match="max_bytes"):
            write()
    store.write(plans.add_unit, lease, planned(0), ())
    store.write(plans.finish, lease, ())


def test_rejects_planned_again_with_others_are_refused(store: Store) -> None:
    lease = start_plan(store)
    store.write(plans.add_rejected, lease, (reject(1), reject(4)), 0)
    store.write(plans.add_rejected, lease, (reject(6), reject(7)), 0)
    for others in ((reject(1), reject(5)), (reject(2), reject(4)), (reject(4), reject(8))):
        for write in (
            partial(store.write, plans.add_rejected, lease, others, 0),
            partial(store.write, plans.add_unit, lease, planned(0), others),
            partial(store.write, plans.finish, lease, others),
        ):
            with pytest.raises(IdentityChanged, match="rejected between other units"):
                write()
    store.write(plans.add_rejected, lease, (reject(1), reject(4)), 0)
    store.write(plans.add_unit, lease, planned(0), (reject(8),))
    assert store.read(commits.rejects, job_id(1)) == [reject(position) for position in (1, 4, 6, 7, 8)]


def test_a_unit_planned_again_with_other_samples_is_refused(store: Store) -> None:
    lease = start_plan(store)
    store.write(plans.add_unit, lease, planned(0), ())
    with pytest.raises(IdentityChanged) as refused:
        store.write(plans.add_unit, lease, PlannedUnit(0, 2, 10, b"another plan"), (reject(3),))
    assert refused.value.field == "source"
    assert store.read(commits.rejects, job_id(1)) == []


def test_another_identity_is_refused_and_what_changed_is_named(store: Store) -> None:
    lease = start_plan(store)
    store.write(plans.set_identity, lease, IDENTITY)
    other = IDENTITY.model_copy(update={"revision": "decade", "max_tokens": 8})
    with pytest.raises(IdentityChanged) as refused:
        store.write(plans.set_identity, lease, other)
    assert "revision, max_tokens" in refused.value.detail
    assert store.read(jobs.job, job_id(1)).identity == IDENTITY


def test_a_plan_needs_an_identity_before_units_or_an_end(store: Store) -> None:
    submit(store)
    lease = lease_plan(store)
    with pytest.raises(IdentityChanged):
        store.write(plans.add_unit, lease, planned(0), ())
    with pytest.raises(IdentityChanged):
        store.write(plans.finish, lease, (reject(0),))
    assert store.read(units.of_job, job_id(1)) == []


def test_an_empty_plan_is_refused_and_names_the_source(store: Store) -> None:
    lease = start_plan(store)
    with pytest.raises(SourceRefused) as refused:
        store.write(plans.finish, lease, ())
    assert refused.value.field == "source"
    assert not store.read(jobs.job, job_id(1)).progress.plan_done


def test_a_queued_job_whose_plan_is_done_runs_on_without_a_planner(store: Store) -> None:
    start_units(store)
    store.write(jobs.cancel, job_id(1))
    store.write(jobs.resume, job_id(1))
    submit(store, 2)
    assert lease_plan(store).job_id == job_id(2)
    assert lease_unit(store).job_id == job_id(1)
    assert store.read(jobs.state, job_id(1)) is JobState.RUNNING


def test_a_plan_that_gets_on_has_all_its_tries_again(store: Store, clock: Clock) -> None:
    """A node that restarts now and then does not block a plan of many hours."""
    start_plan(store)
    for unit in range(2 * MAX_DEATHS):
        clock.advance(TTL_S)
        store.write(plans.add_unit, lease_plan(store), planned(unit), ())
    assert store.read(jobs.state, job_id(1)) is JobState.RUNNING
