"""A push or a deletion that is tried again: the job says why, and a push is blocked after its attempts."""

from schemas.job import JobState
from service.errors import Outcome
from service.store import Store, deletion, jobs, publishing, tasks
from tests.support.store_cases import OWNER, PROBLEM, TTL_S, Clock, capture, job_id, lease_publish

ATTEMPTS = 3
OTHER = PROBLEM.model_copy(update={"detail": "another reason"})


def told(store: Store) -> tuple[JobState, str | None]:
    row = store.read(jobs.job, job_id(1))
    return row.state, row.problem.detail if row.problem else None


def try_again(store: Store, clock: Clock, problem=PROBLEM, outcome: Outcome = Outcome.RETRY) -> None:
    """Let one publisher meet a problem, and wait for its delay."""
    store.write(tasks.fail, lease_publish(store), problem, outcome, ATTEMPTS)
    assert publishing.lease(store, "at once", TTL_S) is None
    clock.advance(TTL_S)


def test_a_push_that_stands_still_says_why_until_it_goes_on(store: Store, clock: Clock) -> None:
    capture(store)
    try_again(store, clock)
    known = len(store.read(jobs.events, job_id(1)))
    try_again(store, clock)
    assert len(store.read(jobs.events, job_id(1))) == known, "the same again is no news"
    try_again(store, clock, OTHER, Outcome.VOID)
    assert len(store.read(jobs.events, job_id(1))) == known + 1
    assert told(store) == (JobState.PUBLISHING, "another reason")
    lease = lease_publish(store)
    store.write(publishing.advance, lease)
    assert told(store) == (JobState.PUBLISHING, None)
    store.write(publishing.complete, lease, None)
    assert told(store) == (JobState.COMPLETED, None)


def test_a_push_is_blocked_after_its_attempts_in_a_row_without_a_commit(store: Store, clock: Clock) -> None:
    capture(store)
    for _ in range(ATTEMPTS - 1):
        try_again(store, clock)
    lease = lease_publish(store)
    store.write(publishing.advance, lease)
    store.write(tasks.fail, lease, PROBLEM, Outcome.RETRY, ATTEMPTS)
    clock.advance(TTL_S)
    try_again(store, clock)
    assert told(store) == (JobState.PUBLISHING, "why")
    try_again(store, clock)
    assert told(store) == (JobState.BLOCKED, "why")


def test_a_deletion_is_tried_again_for_as_long_as_it_fails(store: Store, clock: Clock) -> None:
    capture(store)
    store.write(publishing.complete, lease_publish(store), None)
    store.write(deletion.begin, job_id(1), with_dataset=True)
    for _ in range(2 * ATTEMPTS):
        lease = deletion.lease(store, OWNER, TTL_S)
        assert lease is not None
        store.write(tasks.fail, lease, PROBLEM, Outcome.FAIL, 1)
        assert told(store) == (JobState.DELETING, "why")
        clock.advance(TTL_S)
