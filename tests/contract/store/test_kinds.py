"""Every kind of task is leased, counted, given back and fenced in the same way."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import pytest

from schemas.job import JobState
from service.errors import LeaseLost, Outcome
from service.store import Lease, Store, commits, deletion, jobs, plans, publishing, tasks, units
from service.store.policies import POLICIES
from service.store.values import TaskKind
from tests.support.store_cases import (
    IDENTITY,
    PROBLEM,
    TTL_S,
    Clock,
    account,
    capture,
    job_id,
    made,
    planned,
    reject,
    start_units,
    submit,
)

ATTEMPTS = 3
Verb = Callable[..., object]
"""Of a transaction and a lease."""


@dataclass(frozen=True)
class Kind:
    """`begin` brings job number n to where the kind has one free task, and `work` does the leased one."""

    kind: TaskKind
    begin: Callable[[Store, int], object]
    lease: Callable[[Store, str, float], Lease | None]
    work: tuple[Verb, ...]
    ends: JobState
    """A job's state after the last attempt that may fail."""
    waits: bool
    """After a failed attempt."""
    other_writes: tuple[Verb, ...] = ()


KINDS = (
    Kind(
        TaskKind.PLAN,
        submit,
        plans.lease,
        (
            lambda tx, lease: plans.set_identity(tx, lease, IDENTITY),
            lambda tx, lease: plans.add_rejected(tx, lease, (reject(6),), 0),
            lambda tx, lease: plans.add_unit(tx, lease, planned(0), (reject(7),)),
            lambda tx, lease: plans.finish(tx, lease, (reject(8),)),
        ),
        JobState.BLOCKED,
        waits=True,
    ),
    Kind(
        TaskKind.CAPTURE,
        lambda store, n: start_units(store, 1, n),
        units.lease,
        (lambda tx, lease: commits.commit(tx, made(lease, (reject(0),)), lease),),
        JobState.FAILED,
        waits=False,
    ),
    Kind(
        TaskKind.PUBLISH,
        lambda store, n: capture(store, 1, n),
        publishing.lease,
        (lambda tx, lease: publishing.complete(tx, lease, "c0ffee"),),
        JobState.BLOCKED,
        waits=True,
        other_writes=(publishing.advance,),
    ),
)
pytestmark = pytest.mark.parametrize("of", KINDS, ids=lambda of: of.kind.value)


def take(of: Kind, store: Store, owner: str = "one") -> Lease:
    lease = of.lease(store, owner, TTL_S)
    assert lease is not None
    return lease


def resume(of: Kind, store: Store) -> None:
    store.write(jobs.resume, job_id(1))
    if of.kind is TaskKind.PUBLISH:
        assert plans.lease(store, "one", TTL_S) is None, "its plan is done, and it goes on"


def end(of: Kind, store: Store, lease: Lease) -> None:
    for verb in of.work:
        store.write(verb, lease)


def test_a_task_has_one_owner_until_its_lease_runs_out(of: Kind, store: Store, clock: Clock) -> None:
    of.begin(store, 1)
    first = take(of, store)
    clock.advance(TTL_S - 1)
    assert store.write(tasks.extend, [first], TTL_S) == []
    clock.advance(TTL_S - 1)
    assert of.lease(store, "heir", TTL_S) is None
    clock.advance(1)
    heir = take(of, store, "heir")
    assert (heir.job_id, heir.item, heir.epoch, heir.attempts) == (first.job_id, first.item, 2, 1)


def test_a_lease_that_ran_out_is_good_until_another_owner_takes_the_task(
    of: Kind, store: Store, clock: Clock
) -> None:
    of.begin(store, 1)
    late = take(of, store)
    clock.advance(10 * TTL_S)
    end(of, store, late)
    clock.advance(10 * TTL_S)
    assert of.lease(store, "another", TTL_S) is None, "it is done"


def test_owners_that_vanish_block_the_job_in_the_end_and_the_next_job_is_served(
    of: Kind, store: Store, clock: Clock
) -> None:
    """1. As many owners vanish as may. 2. The job is blocked. 3. Resumed, it has all its deaths again."""
    of.begin(store, 1)
    for _ in range(POLICIES[of.kind].max_deaths):
        while (lease := of.lease(store, "owner", TTL_S)) is None:
            clock.advance(TTL_S)  # it rests
        assert lease.job_id == job_id(1)
        clock.advance(TTL_S)
    of.begin(store, 2)
    assert take(of, store).job_id == job_id(2)
    job = store.read(jobs.job, job_id(1))
    assert job.state is JobState.BLOCKED and job.problem is not None
    assert f"{POLICIES[of.kind].max_deaths} " in job.problem.detail and "died" in job.problem.detail
    resume(of, store)
    assert take(of, store).job_id == job_id(1)


def test_only_attempts_that_fail_are_counted(of: Kind, store: Store, clock: Clock) -> None:
    """1. Owners vanish, find no store, stop in order or give the task back. 2. The last failure counts.

    3. Resumed, it has as many attempts again.
    """

    def fail(outcome: Outcome) -> None:
        store.write(tasks.fail, take(of, store), PROBLEM, outcome, ATTEMPTS)
        if of.waits:
            assert of.lease(store, "at once", TTL_S) is None
        clock.advance(TTL_S)

    of.begin(store, 1)
    for _ in range(2):
        for _ in range(ATTEMPTS - 1):
            take(of, store)
            clock.advance(TTL_S)
            fail(Outcome.VOID)
            store.write(tasks.release, take(of, store))
            take(of, store, "stops in order")
            store.write(tasks.release_owner, "stops in order")
            fail(Outcome.RETRY)
            assert store.read(jobs.job, job_id(1)).state not in {JobState.BLOCKED, JobState.FAILED}
        store.write(tasks.fail, take(of, store), PROBLEM, Outcome.RETRY, ATTEMPTS)
        job = store.read(jobs.job, job_id(1))
        assert (job.state, job.problem) == (of.ends, PROBLEM)
        resume(of, store)


def test_an_owner_that_ended_gives_back_its_own_tasks_at_once(of: Kind, store: Store) -> None:
    """1. Two owners have a task each. 2. One has ended. 3. Its task alone is free, and its lease is lost."""
    for number in (1, 2):
        of.begin(store, number)
    ended, kept = take(of, store, "ends"), take(of, store, "stays")
    store.write(tasks.release_owner, "ends")
    again = take(of, store)
    assert (again.job_id, again.epoch, again.attempts) == (ended.job_id, 2, 1)
    assert of.lease(store, "another", TTL_S) is None
    assert store.write(tasks.extend, [ended, kept], TTL_S) == [ended]


FORGED = {"epoch": {"epoch": 2}, "owner": {"owner": "another"}, "item": {"item": 7}}
LOST = [*FORGED, "expired", "released", "done", "cancelled", "resumed", "deleted"]


@pytest.mark.parametrize("lost", LOST)
def test_nothing_is_written_under_a_lease_that_is_lost(
    of: Kind, store: Store, clock: Clock, lost: str
) -> None:
    of.begin(store, 1)
    lease = take(of, store)
    if lost in FORGED:
        lease = replace(lease, **FORGED[lost])
    elif lost == "expired":
        clock.advance(TTL_S)
        take(of, store)
    elif lost == "released":
        store.write(tasks.release, lease)
    elif lost == "done":
        end(of, store, lease)
    else:
        store.write(jobs.cancel, job_id(1))
    if lost == "resumed":
        resume(of, store)
        take(of, store)
    elif lost == "deleted":
        store.write(deletion.begin, job_id(1), with_dataset=False)
        store.write(deletion.forget, job_id(1))
    before = None if lost == "deleted" else account(store)
    fails = [
        partial(tasks.fail, problem=PROBLEM, outcome=outcome, max_attempts=ATTEMPTS) for outcome in Outcome
    ]
    for verb in (*fails, tasks.release, *of.work, *of.other_writes):
        with pytest.raises(LeaseLost):
            store.write(verb, lease=lease)
    assert store.write(tasks.extend, [lease], TTL_S) == [lease]
    assert before is None or account(store) == before


@pytest.mark.parametrize(
    ("outcome", "state"), [(Outcome.FAIL, JobState.FAILED), (Outcome.BLOCK, JobState.BLOCKED)], ids=str
)
def test_what_no_other_try_would_mend_ends_the_job_at_once(
    of: Kind, store: Store, outcome: Outcome, state: JobState
) -> None:
    of.begin(store, 1)
    store.write(tasks.fail, take(of, store), PROBLEM, outcome, ATTEMPTS)
    job = store.read(jobs.job, job_id(1))
    assert (job.state, job.problem) == (state, PROBLEM)


def test_an_owner_that_chose_a_job_too_late_gets_nothing(of: Kind, store: Store, database: Store) -> None:
    """1. Jobs are chosen. 2. The task of one is leased, one is cancelled, and one has been deleted."""
    of.begin(store, 1)
    take(of, store)
    of.begin(store, 2)
    store.write(jobs.cancel, job_id(2))
    for number in (1, 2, 3):
        with database.writing() as tx:
            assert tasks._take(tx, of.kind, job_id(number), "late", TTL_S) is None
