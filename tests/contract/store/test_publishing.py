"""Publishing: only whole jobs, one committer a repository."""

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from schemas.job import JobState
from service.errors import LeaseLost
from service.store import Store, hosts, jobs, plans, publishing, tasks
from service.store.policies import POLICIES
from service.store.values import TaskKind
from tests.support.store_cases import (
    IDENTITY,
    OWNER,
    TTL_S,
    Clock,
    capture,
    commit,
    job_id,
    lease_publish,
    lease_unit,
    planned,
    provenance,
    start_plan,
    start_units,
    stop_job,
)

REPO = "org/data"
DAY_S = 86_400.0


def test_a_job_is_published_only_when_its_plan_and_all_units_are_done(store: Store) -> None:
    assert publishing.lease(store, OWNER, TTL_S) is None
    plan = start_plan(store)
    assert publishing.lease(store, OWNER, TTL_S) is None, "nothing is planned"
    store.write(plans.add_unit, plan, planned(0), ())
    commit(store, lease_unit(store))
    assert publishing.lease(store, OWNER, TTL_S) is None, "the plan goes on"
    store.write(plans.add_unit, plan, planned(1), ())
    store.write(plans.finish, plan, ())
    assert publishing.lease(store, OWNER, TTL_S) is None, "a unit waits"
    unit = lease_unit(store)
    assert publishing.lease(store, OWNER, TTL_S) is None, "a unit is leased"
    commit(store, unit)
    lease = lease_publish(store)
    assert (lease.job_id, lease.epoch, lease.owner) == (job_id(1), 1, OWNER)
    assert (lease.identity, lease.provenance) == (IDENTITY, provenance())
    assert store.read(jobs.state, job_id(1)) is JobState.PUBLISHING


def test_a_job_of_rejects_alone_is_published_without_provenance(store: Store) -> None:
    start_units(store, units=0)
    lease = lease_publish(store)
    assert (lease.job_id, lease.identity, lease.provenance) == (job_id(1), IDENTITY, None)


def test_one_repository_has_one_committer_at_a_time(store: Store) -> None:
    capture(store, number=1, repo_id=REPO)
    capture(store, number=2, repo_id=REPO)
    capture(store, number=3, repo_id="org/other")
    capture(store, number=4)
    first = lease_publish(store)
    assert first.job_id == job_id(1)
    assert {lease_publish(store).job_id, lease_publish(store).job_id} == {job_id(3), job_id(4)}
    assert publishing.lease(store, OWNER, TTL_S) is None
    store.write(publishing.complete, first, "c0ffee")
    second = lease_publish(store)
    assert second.job_id == job_id(2)


def test_a_stale_publisher_is_fenced_by_another_job_of_its_repository(store: Store, clock: Clock) -> None:
    """1. Job 1's publisher stops beating. 2. Job 2 gets the repository. 3. The first publisher wakes."""
    capture(store, number=1, repo_id=REPO)
    capture(store, number=2, repo_id=REPO)
    stale = lease_publish(store)
    clock.advance(TTL_S)
    stop_job(store, job_id(1))
    lease = lease_publish(store)
    assert lease.job_id == job_id(2)
    for forged in (stale, replace(stale, epoch=lease.epoch), replace(lease, job_id=job_id(1))):
        with pytest.raises(LeaseLost):
            store.write(publishing.complete, forged, "stale")
    store.write(publishing.complete, lease, "c0ffee")


def test_a_publisher_that_chose_a_job_of_a_leased_repository_gets_nothing(
    store: Store, database: Store
) -> None:
    capture(store, number=1, repo_id=REPO)
    capture(store, number=2, repo_id=REPO)
    lease_publish(store)
    with database.writing() as tx:
        assert tasks._take(tx, TaskKind.PUBLISH, job_id(2), "late", TTL_S) is None
    assert store.read(jobs.state, job_id(2)) is JobState.RUNNING


def test_the_last_death_that_another_job_of_the_repository_counts_blocks_its_own_job_alone(
    store: Store, clock: Clock
) -> None:
    """1. Publishers of two jobs of one repository vanish in turn. 2. Each job is blocked in the end."""
    for number in (1, 2):
        capture(store, number=number, repo_id=REPO)
    for _ in range(POLICIES[TaskKind.PUBLISH].max_deaths):
        for number in (1, 2):
            with store.writing() as tx:
                assert tasks._take(tx, TaskKind.PUBLISH, job_id(number), OWNER, TTL_S) is not None
            clock.advance(TTL_S)
    capture(store, number=3, repo_id=REPO)
    assert lease_publish(store).job_id == job_id(3)
    for number in (1, 2):
        job = store.read(jobs.job, job_id(number))
        assert job.state is JobState.BLOCKED and job.problem is not None
        assert "20 publishers died" in job.problem.detail


@pytest.mark.slow
def test_a_push_that_gets_on_forgets_the_deaths_before(store: Store, clock: Clock) -> None:
    capture(store, repo_id=REPO)
    for _ in range(2 * POLICIES[TaskKind.PUBLISH].max_deaths):
        store.write(publishing.advance, lease_publish(store))
        clock.advance(TTL_S)
    store.write(publishing.complete, lease_publish(store), "c0ffee")


def test_a_job_was_captured_when_its_last_unit_was_committed(store: Store, clock: Clock) -> None:
    """However long it then waits, and however often it is stopped and published."""
    start_units(store, 2)
    commit(store, lease_unit(store))
    clock.advance(5)
    captured_at = datetime.fromtimestamp(clock.now_s, UTC)
    commit(store, lease_unit(store))
    for _ in range(2):
        clock.advance(DAY_S)
        assert lease_publish(store).captured_at == captured_at
        stop_job(store, job_id(1))
        store.write(jobs.resume, job_id(1))


def test_an_attempt_from_before_a_lost_host_is_fenced_where_the_same_owner_publishes_anew(
    store: Store,
) -> None:
    """1. The data folder is given up during the publishing. 2. Its unit is captured in the next one."""
    store.write(hosts.register, "a" * 32, "home", is_home=True)
    capture(store, repo_id=REPO)
    before = lease_publish(store)
    assert store.write(hosts.forget, "a" * 32) == 1
    store.write(hosts.register, "b" * 32, "home", is_home=True)
    commit(store, lease_unit(store))
    anew = lease_publish(store)
    with pytest.raises(LeaseLost):
        store.write(publishing.complete, before, "c0ffee")
    store.write(publishing.complete, anew, "c0ffee")
    assert store.read(jobs.state, job_id(1)) is JobState.COMPLETED
