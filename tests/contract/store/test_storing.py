"""What is stored in one commit, and when."""

from dataclasses import replace

import pytest
from sqlalchemy import update

from schemas.job import JobState
from service.errors import HubDenied, LeaseLost, Outcome, QuarryError, WriteFailed
from service.store import (
    HOME,
    Store,
    StoreLease,
    UnitLease,
    commits,
    hosts,
    jobs,
    publishing,
    storing,
    tasks,
    units,
)
from service.store.tables import JOB
from tests.support.store_cases import (
    PROBLEM,
    Clock,
    job_id,
    lease_publish,
    lease_unit,
    made,
    shard,
    start_units,
)

REPO = "org/data"
OWNER = "storer"
TTL_S = 60.0
RANKS = 8
ATTEMPTS = 3
APART_S = storing.APART.total_seconds()
LATEST_S = storing.LATEST.total_seconds()


def commit_of_ranks(store: Store, lease: UnitLease) -> None:
    """Commit a unit with a shard a rank, of a row each."""
    whole, one = made(lease), shard(lease, 1)
    shards = [one.model_copy(update={"path": f"{one.path}-r{rank}"}) for rank in range(RANKS)]
    store.write(commits.commit, replace(whole, shards=tuple(shards)), lease)


def capture(store: Store, count: int, number: int = 1) -> None:
    for _ in range(count):
        commit_of_ranks(store, lease_unit(store, job=job_id(number)))


def leased(store: Store, after_s: float, clock: Clock) -> StoreLease | None:
    clock.advance(after_s)
    return storing.lease(store, OWNER, TTL_S)


def test_commits_to_one_repository_stand_apart(store: Store, clock: Clock) -> None:
    """1. Three jobs upload. 2. One commits. 3. Another of its repository waits, and the third does not."""
    for number, repo_id in ((1, REPO), (2, REPO), (3, "org/other")):
        start_units(store, units=30, number=number, repo_id=repo_id, num_samples=RANKS)
        capture(store, 12, number)
    leases = [leased(store, after_s, clock) for after_s in (APART_S + 1, 0, 0)]
    first, second, other = (lease for lease in leases if lease is not None)
    assert [lease.job_id for lease in (first, second, other)] == [job_id(number) for number in (1, 2, 3)]
    assert [store.write(storing.take_turn, lease) for lease in (first, second, other)] == [0.0, APART_S, 0.0]
    store.write(storing.stored, first, range(11))
    clock.advance(APART_S - 1)
    assert store.write(storing.take_turn, second) == 1.0
    clock.advance(1)
    assert store.write(storing.take_turn, second) == 0.0
    with pytest.raises(LeaseLost):
        store.write(storing.take_turn, first)


@pytest.mark.slow
def test_a_repository_that_was_asked_too_often_is_left_alone_by_all_jobs(store: Store, clock: Clock) -> None:
    """1. The Hub asks one job to wait for an hour. 2. A full commit of another does not hasten it."""
    for number in (1, 2):
        start_units(store, units=30, number=number, repo_id=REPO, num_samples=RANKS)
    capture(store, 12)
    lease = leased(store, APART_S + 1, clock)
    assert lease is not None
    store.write(tasks.fail, lease, PROBLEM, Outcome.VOID, 1, 3600.0)
    capture(store, 12, number=2)
    other = leased(store, 3599 - 10, clock)
    assert other is not None and store.write(storing.take_turn, other) == 11.0


def test_a_disk_that_fills_has_units_stored_at_once_and_after_a_failure_no_sooner_than_others(
    store: Store, clock: Clock
) -> None:
    """1. A unit waits for more. 2. The disk fills. 3. The Hub fails. 4. The disk is still as full."""
    start_units(store, units=30, number=1, repo_id=REPO, num_samples=RANKS)
    store.write(lambda tx: tx.connection.execute(update(JOB).values(keeps_local=False)))
    capture(store, 1)
    assert leased(store, APART_S, clock) is None
    store.write(storing.hasten, HOME)
    lease = leased(store, 0, clock)
    assert lease is not None
    store.write(tasks.fail, lease, PROBLEM, Outcome.VOID, 1, 3600.0)
    store.write(storing.hasten, HOME)
    assert leased(store, APART_S - 1, clock) is None
    assert leased(store, 1, clock) is not None


def test_a_commit_of_a_publication_counts_as_well(store: Store, clock: Clock) -> None:
    start_units(store, units=30, number=1, repo_id=REPO, num_samples=RANKS)
    capture(store, 12)
    start_units(store, units=1, number=2, repo_id=REPO, num_samples=RANKS)
    capture(store, 1, number=2)
    clock.advance(APART_S)
    store.write(publishing.complete, lease_publish(store), "c0ffee")
    lease = leased(store, APART_S - 1, clock)
    assert lease is not None and store.write(storing.take_turn, lease) == 1.0


def waiting(store: Store) -> list[int]:
    made = store.read(commits.waiting, job_id(1), HOME, storing.FULL_FILES)
    assert sum(len(unit.files) for unit in made) <= storing.FULL_FILES
    return [unit.attempt_id.unit for unit in made]


def test_a_commit_is_full_by_its_files_and_not_by_its_units(store: Store, clock: Clock) -> None:
    """A unit has eight shards and an index: 11 of them are 99 files, and a twelfth waits for the next."""
    start_units(store, units=30, repo_id=REPO, num_samples=RANKS)
    capture(store, 11)
    assert leased(store, APART_S + 1, clock) is None, "99 files wait for more"
    capture(store, 1)
    lease = leased(store, APART_S + 1, clock)
    assert lease is not None and waiting(store) == list(range(11))
    store.write(storing.stored, lease, range(11))
    assert leased(store, APART_S + 1, clock) is None and waiting(store) == [11]
    capture(store, 11)
    lease = leased(store, APART_S + 1, clock)
    assert lease is not None
    store.write(storing.stored, lease, range(11, 12))
    assert leased(store, APART_S - 1, clock) is None
    assert leased(store, 1, clock) is None, "eleven units do not fill it"
    assert leased(store, LATEST_S, clock) is not None


def test_a_unit_of_more_files_than_a_commit_should_have_is_stored_alone(store: Store) -> None:
    start_units(store, units=3, repo_id=REPO, num_samples=RANKS)
    capture(store, 2)
    assert [u.attempt_id.unit for u in store.read(commits.waiting, job_id(1), HOME, RANKS)] == [0]


def captured_far(store: Store) -> int:
    """Bring a job to where its one unit lies on a machine without the data folder; return its host."""
    store.write(hosts.register, "a" * 32, "home", is_home=True)
    far = store.write(hosts.register, "b" * 32, "far", is_home=False)
    start_units(store, units=1, repo_id=REPO, num_samples=RANKS)
    lease = units.lease(store, "far", TTL_S, host=far)
    assert lease is not None
    commit_of_ranks(store, lease)
    return far


def fail(store: Store, clock: Clock, host: int, error: QuarryError) -> None:
    clock.advance(TTL_S)
    lease = storing.lease(store, OWNER, TTL_S, host)
    assert lease is not None
    store.write(tasks.fail, lease, error.problem(), error.outcome, ATTEMPTS)


@pytest.mark.parametrize(("error", "times"), [(HubDenied("no right"), 1), (WriteFailed("gone"), ATTEMPTS)])
def test_a_captured_job_whose_last_units_cannot_be_stored_is_blocked_with_the_reason(
    store: Store, clock: Clock, error: QuarryError, times: int
) -> None:
    """Its publication waits for them, so they are no longer stored ahead; resumed, it is stored."""
    far = captured_far(store)
    for _ in range(times):
        assert store.read(jobs.state, job_id(1)) is JobState.RUNNING
        fail(store, clock, far, error)
    job = store.read(jobs.job, job_id(1))
    assert job.state is JobState.BLOCKED and job.problem is not None and job.problem.detail == error.detail
    store.write(jobs.resume, job_id(1))
    lease = storing.lease(store, OWNER, TTL_S, far)
    assert lease is not None
    store.write(storing.stored, lease, [0])
    assert lease_publish(store).job_id == job_id(1)


def test_while_units_are_captured_no_store_ends_the_job(store: Store, clock: Clock) -> None:
    start_units(store, units=30, repo_id=REPO, num_samples=RANKS)
    capture(store, 12)
    for _ in range(ATTEMPTS + 1):
        fail(store, clock, HOME, HubDenied("no right"))
    assert store.read(jobs.state, job_id(1)) is JobState.RUNNING
