"""A Hub that does not answer: what needs it waits as long as a push does, and its own failures stay apart."""

import pytest

from schemas.job import JobState
from service.errors import HubUnavailable, WriteFailed
from service.store import Store, jobs, plans, storing, tasks, units, workers
from tests.support.store_cases import (
    IDENTITY,
    TTL_S,
    Clock,
    commit,
    job_id,
    lease_plan,
    lease_unit,
    start_units,
    submit,
)

ATTEMPTS, HUB_ATTEMPTS = 3, 24
AWAY = HubUnavailable("the Hub did not answer")
HOURS_S = 3600.0


def fail_plan(store: Store, error: HubUnavailable | WriteFailed = AWAY) -> None:
    bounds = ATTEMPTS, error.wait_s, HUB_ATTEMPTS
    store.write(tasks.fail, lease_plan(store), error.problem(), error.outcome, *bounds)


def fail_unit(store: Store, error: HubUnavailable | WriteFailed = AWAY) -> None:
    store.write(workers.failed, lease_unit(store, "one"), error, ATTEMPTS, HUB_ATTEMPTS)


def wait_for_plan(store: Store, clock: Clock, step_s: float = 10.0) -> float:
    """Return the seconds after which the plan is free again."""
    waited_s = 0.0
    while (lease := plans.lease(store, "looks", TTL_S)) is None:
        clock.advance(step_s)
        waited_s += step_s
    store.write(tasks.release, lease)
    return waited_s


def state(store: Store) -> JobState:
    return store.read(jobs.state, job_id(1))


@pytest.mark.slow
def test_a_plan_waits_longer_each_time_and_is_blocked_after_hours(store: Store, clock: Clock) -> None:
    submit(store)
    waits = []
    for _ in range(HUB_ATTEMPTS - 1):
        fail_plan(store)
        waits.append(wait_for_plan(store, clock))
    assert waits[:7] == [30.0, 60.0, 120.0, 240.0, 480.0, 900.0, 900.0]
    assert sum(waits) > 4 * HOURS_S
    fail_plan(store)
    job = store.read(jobs.job, job_id(1))
    assert job.state is JobState.BLOCKED and job.problem is not None
    assert job.problem.detail == AWAY.detail and "resume the job" in (job.problem.cure or "")


def test_a_unit_waits_as_a_plan_does_and_blocks_its_job(store: Store, clock: Clock) -> None:
    start_units(store, units=1)
    for _ in range(HUB_ATTEMPTS):
        assert state(store) is not JobState.BLOCKED
        fail_unit(store)
        assert units.lease(store, "one", TTL_S) is None
        clock.advance(15 * TTL_S)
    assert state(store) is JobState.BLOCKED
    store.write(jobs.resume, job_id(1))
    commit(store, lease_unit(store))


@pytest.mark.parametrize("away", [1, HUB_ATTEMPTS - 1])
def test_what_met_no_hub_is_no_failure_of_the_unit(store: Store, clock: Clock, away: int) -> None:
    """1. The Hub is away. 2. It is back, and the unit fails by itself: it has all of its attempts."""
    start_units(store, units=1)
    for _ in range(away):
        fail_unit(store)
        clock.advance(15 * TTL_S)
    for _ in range(ATTEMPTS):
        assert state(store) is JobState.RUNNING
        fail_unit(store, WriteFailed("why"))
    assert state(store) is JobState.FAILED


def test_a_wait_that_the_hub_asks_for_is_kept(store: Store, clock: Clock) -> None:
    """It is none of the repository that the job is pushed to."""
    asked = HubUnavailable("the Hub answered 503")
    asked.wait_s = HOURS_S
    submit(store, repo_id="org/data")
    fail_plan(store, asked)
    assert wait_for_plan(store, clock, 600.0) == HOURS_S
    start_units(store, number=2, repo_id="org/data")
    commit(store, lease_unit(store, job=job_id(2)))
    clock.advance(600.0)
    lease = storing.lease(store, "stores", TTL_S)
    assert lease is not None and store.write(storing.take_turn, lease) == 0.0


def test_a_worker_that_meets_no_hub_takes_other_models_meanwhile(store: Store, clock: Clock) -> None:
    """1. A unit meets no Hub. 2. Others of its model wait too. 3. A worker that meets it goes on."""
    start_units(store, units=5)
    other = IDENTITY.model_copy(update={"weights_sha256": "ab" * 32})
    start_units(store, units=1, number=2, identity=other)
    store.write(workers.beat, "one", TTL_S)
    lease_unit(store, "two")
    fail_unit(store)
    assert lease_unit(store, "one").job_id == job_id(2)
    assert units.lease(store, "one", TTL_S) is None
    assert (lease_unit(store, "two").job_id, store.read(workers.sick)) == (job_id(1), [])
    clock.advance(TTL_S / 2)
    lease = lease_unit(store, "one")
    assert (lease.job_id, lease.item, lease.is_probe) == (job_id(1), 1, False)
