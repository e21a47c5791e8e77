"""Jobs that came to rest wait to be swept, each once a rest."""

import pytest

from schemas.job import RESTING_JOB_STATES, JobState
from service.errors import LeaseLost
from service.store import Lease, Store, jobs, tasks
from tests.support.store_cases import TTL_S, Clock, job_id, reach

SWEPT = sorted(RESTING_JOB_STATES - {JobState.DELETING})


def take(store: Store, owner: str = "one") -> Lease | None:
    return tasks.lease_sweep(store, owner, TTL_S)


def taken(store: Store, owner: str = "one") -> Lease:
    lease = take(store, owner)
    assert lease is not None
    return lease


@pytest.mark.parametrize("state", SWEPT, ids=str)
def test_a_job_that_came_to_rest_is_swept_once_and_stays_as_it_is(store: Store, state: JobState) -> None:
    before = reach(store, state)
    events = store.read(jobs.events, before.id)
    lease = taken(store)
    assert take(store, "another") is None
    store.write(tasks.end_sweep, lease)
    assert take(store) is None
    assert store.read(jobs.job, before.id) == before
    assert store.read(jobs.events, before.id) == events


@pytest.mark.parametrize("state", sorted(set(JobState) - set(SWEPT)), ids=str)
def test_no_other_job_is_swept(store: Store, state: JobState) -> None:
    reach(store, state)
    assert take(store) is None


def test_a_job_that_rests_once_more_is_swept_once_more(store: Store) -> None:
    """1. A sweep is done. 2. The job goes on and rests. 3. Again, during its sweep, which is lost."""
    reach(store, JobState.PAUSED)
    store.write(tasks.end_sweep, taken(store))
    store.write(jobs.resume, job_id(1))
    assert take(store) is None
    store.write(jobs.pause, job_id(1))
    lease = taken(store)
    store.write(jobs.cancel, job_id(1))
    with pytest.raises(LeaseLost):
        store.write(tasks.end_sweep, lease)
    assert taken(store).epoch == lease.epoch + 1


def test_a_sweep_that_a_lost_owner_held_is_another_owners(store: Store, clock: Clock) -> None:
    """However often that happens, nothing becomes of the job."""
    before = reach(store, JobState.COMPLETED)
    for _ in range(30):
        lost = taken(store)
        clock.advance(TTL_S)
    store.write(tasks.end_sweep, taken(store, "another"))
    with pytest.raises(LeaseLost):
        store.write(tasks.end_sweep, lost)
    assert store.read(jobs.job, before.id) == before


def test_a_sweep_that_is_put_off_waits(store: Store, clock: Clock) -> None:
    reach(store, JobState.FAILED)
    store.write(tasks.postpone, taken(store))
    assert take(store) is None
    clock.advance(TTL_S)
    assert take(store) is not None
