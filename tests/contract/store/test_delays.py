"""A push that stands still: told once, from the first error on, and fenced like all that a publisher does."""

import pytest

from schemas.job import JobState
from service.errors import LeaseLost
from service.store import Store, jobs, publishing
from tests.support.store_cases import PROBLEM, TTL_S, Clock, capture, job_id, lease_publish

DEADLINE_S = 3600.0
OTHER = PROBLEM.model_copy(update={"detail": "another reason"})


def told(store: Store) -> tuple[JobState, str | None]:
    row = store.read(jobs.job, job_id(1))
    return row.state, row.problem.detail if row.problem else None


def delay(store: Store, clock: Clock, reached: int) -> None:
    """Let one publisher meet the problem at `reached`, and wait for its delay."""
    lease = lease_publish(store)
    store.write(publishing.delay, lease, PROBLEM, reached, DEADLINE_S)
    assert publishing.lease(store, "at once", TTL_S) is None
    clock.advance(TTL_S)


def test_a_push_that_stands_still_says_why_until_it_goes_on(store: Store, clock: Clock) -> None:
    capture(store)
    since = clock.now_s
    delay(store, clock, 3)
    known = len(store.read(jobs.events, job_id(1)))
    delay(store, clock, 3)
    lease = lease_publish(store)
    store.write(publishing.advance, lease, 3)
    assert len(store.read(jobs.events, job_id(1))) == known, "the same again is no news"
    store.write(publishing.delay, lease, OTHER, 3, DEADLINE_S)
    last = store.read(jobs.events, job_id(1))[-1]
    assert last.delay is not None
    assert (last.delay.since.timestamp(), last.delay.reached) == (since, 3)
    assert told(store) == (JobState.PUBLISHING, "another reason")
    clock.advance(TTL_S)
    lease = lease_publish(store)
    store.write(publishing.advance, lease, 4)
    assert told(store) == (JobState.PUBLISHING, None)
    store.write(publishing.complete, lease, None)
    assert told(store) == (JobState.COMPLETED, None)


def test_a_push_is_blocked_for_standing_still_and_not_for_taking_long(store: Store, clock: Clock) -> None:
    capture(store)
    for reached in (1, 2):
        clock.advance(10 * DEADLINE_S)
        delay(store, clock, reached)
        assert told(store) == (JobState.PUBLISHING, "why")
    clock.advance(DEADLINE_S + 1)
    delay(store, clock, 2)
    assert told(store) == (JobState.BLOCKED, "why")


def test_a_publisher_that_lost_its_lease_tells_nothing(store: Store, clock: Clock) -> None:
    capture(store)
    stale = lease_publish(store)
    clock.advance(TTL_S)
    lease_publish(store, "heir")
    with pytest.raises(LeaseLost):
        store.write(publishing.delay, stale, PROBLEM, 1, DEADLINE_S)
    with pytest.raises(LeaseLost):
        store.write(publishing.advance, stale, 1)
    assert told(store) == (JobState.PUBLISHING, None)
