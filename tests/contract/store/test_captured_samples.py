"""What the runs of a schedule have written, beside commits, slots, resumes and deletions at the same time."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from sqlalchemy import select

from schemas.dataset.columns import CONTENT_HASH_BYTES
from schemas.job import JobState
from schemas.schedule import RunOutcome, Samples
from service.errors import Conflict, LeaseLost, NotFound, Outcome
from service.store import (
    HOME,
    Store,
    UnitLease,
    commits,
    hosts,
    jobs,
    plans,
    publishing,
    schedules,
    tasks,
    totals,
    units,
)
from service.store.schedule_tables import CAPTURED_SAMPLES
from tests.contract.store.test_schedules import HOUR_S, REQUEST, look, schedule
from tests.support.store_cases import (
    IDENTITY,
    OWNER,
    PROBLEM,
    TTL_S,
    Clock,
    lease_plan,
    lease_unit,
    made,
    planned,
    stop_job,
)

ROUNDS = 8


def begin(store: Store, clock: Clock, num_units: int) -> str:
    """Make a job of the schedule whose units all wait; return its id."""
    clock.advance(1)
    run = store.write(schedules.run_now, "hourly")
    assert run.job_id is not None
    lease = lease_plan(store)
    store.write(plans.set_identity, lease, IDENTITY)
    for unit in range(num_units):
        store.write(plans.add_unit, lease, planned(unit), (), 1)
    store.write(plans.finish, lease, ())
    return run.job_id


def hashes_of(lease: UnitLease) -> bytes:
    name = f"{lease.job_id[2:10]}{lease.item:08}".encode()
    return name * lease.num_samples


def commit(store: Store, lease: UnitLease) -> None:
    store.write(commits.commit, replace(made(lease), content_hashes=hashes_of(lease)), lease)


def recorded(store: Store) -> set[tuple[str, int]]:
    """Return the units whose keys are recorded."""
    columns = (CAPTURED_SAMPLES.c.job_id, CAPTURED_SAMPLES.c.unit, CAPTURED_SAMPLES.c.content_hashes)
    with store.reading() as tx:
        rows = tx.connection.execute(select(*columns)).all()
    assert all(len(keys) == 2 * CONTENT_HASH_BYTES for *_, keys in rows)
    return {(job, unit) for job, unit, _ in rows}


def committed(store: Store, *job_ids: str) -> set[tuple[str, int]]:
    return {(job, shard.unit) for job in job_ids for shard in store.read(commits.shards, job)}


def together(*acts: Callable[[], object]) -> None:
    """Run all at the same time."""
    gate = threading.Barrier(len(acts))

    def one(act: Callable[[], object]) -> None:
        gate.wait()
        act()

    with ThreadPoolExecutor(len(acts)) as pool:
        list(pool.map(one, acts))


def test_keys_are_recorded_with_the_commit_or_not_at_all(store: Store, clock: Clock) -> None:
    store.write(schedules.add, schedule())
    job = begin(store, clock, 2)
    lost, kept = lease_unit(store), lease_unit(store)
    commit(store, kept)
    stop_job(store, job, JobState.FAILED)
    with pytest.raises(LeaseLost):
        commit(store, lost)
    assert recorded(store) == committed(store, job) == {(job, 1)}
    assert store.read(jobs.job, job).progress.samples_known == 2


def test_a_job_that_is_replaced_while_its_units_are_committed_keeps_just_those(
    store: Store, clock: Clock
) -> None:
    """In each round three workers commit what they can, and a run replaces their job."""
    store.write(schedules.add, schedule(overlap="replace"))
    made_jobs = []
    for _ in range(ROUNDS):
        job = begin(store, clock, 9)
        made_jobs.append(job)
        leases = [lease_unit(store, job=job) for _ in range(9)]

        def work(share: list[UnitLease]) -> None:
            for lease in share:
                try:
                    commit(store, lease)
                except LeaseLost:
                    return

        clock.advance(1)
        shares = [lambda share=leases[n::3]: work(share) for n in range(3)]
        together(*shares, lambda: store.write(schedules.run_now, "hourly"))
        progress = store.read(jobs.job, job).progress
        done = committed(store, job)
        state = store.read(jobs.state, job)
        assert state is (JobState.QUEUED if 0 < len(done) < 9 or progress.is_captured else JobState.CANCELLED)
        assert (progress.units_done, progress.samples_written) == (len(done), 2 * len(done))
        if done:
            assert (progress.units_planned, progress.samples_planned) == (len(done), 2 * len(done))
            assert progress.samples_given_up == 2 * (9 - len(done))
        store.write(jobs.cancel, store.read(schedules.past, "hourly", limit=1)[0].job_id)
    assert recorded(store) == committed(store, *made_jobs)


def test_a_failed_job_is_resumed_or_followed_but_never_both(store: Store, clock: Clock) -> None:
    store.write(schedules.add, schedule())
    resumed = 0
    for _ in range(ROUNDS):
        job = begin(store, clock, 2)
        commit(store, lease_unit(store, job=job))
        stop_job(store, job, JobState.FAILED)

        def resume(job: str = job) -> None:
            try:
                store.write(jobs.resume, job)
            except Conflict:
                return

        clock.advance(HOUR_S)
        together(resume, lambda: look(store))
        run = store.read(schedules.past, "hourly", limit=1)[0]
        progress = store.read(jobs.job, job).progress
        assert progress.units_planned == (2 if run.job_id == job else 1)
        resumed += run.job_id == job
        for name in {job, run.job_id}:
            if store.read(jobs.state, name) is JobState.QUEUED:
                store.write(jobs.cancel, name)
        look(store)
        for waiting in store.read(jobs.page)[0]:
            if waiting.state is JobState.QUEUED:
                store.write(jobs.cancel, waiting.id)
    print(f"resumed in {resumed} of {ROUNDS} rounds")


def test_a_schedule_that_is_deleted_beside_a_commit_leaves_no_keys(store: Store, clock: Clock) -> None:
    for _ in range(ROUNDS):
        store.write(schedules.add, schedule())
        job = begin(store, clock, 1)
        lease = lease_unit(store, job=job)
        together(lambda lease=lease: commit(store, lease), lambda: store.write(schedules.remove, "hourly"))
        assert recorded(store) == set()
        with pytest.raises(NotFound):
            store.read(schedules.schedule_view, "hourly")


def test_a_job_that_was_cut_short_is_published_and_is_no_good_run(store: Store, clock: Clock) -> None:
    store.write(schedules.add, schedule())
    job = begin(store, clock, 3)
    captured_at = datetime.fromtimestamp(clock.now_s, UTC)
    commit(store, lease_unit(store))
    store.write(tasks.fail, lease_unit(store), PROBLEM, Outcome.FAIL, 1)
    clock.advance(HOUR_S)
    before = store.read(totals.totals)
    look(store)
    after = store.read(totals.totals)
    assert (after.units_planned, after.tokens_planned) == (before.units_planned, before.tokens_planned)
    assert after.units_failed == before.units_failed == 1
    lease = publishing.lease(store, OWNER, TTL_S)
    assert lease is not None and lease.job_id == job
    assert lease.captured_at == captured_at, "it is not the next night's"
    store.write(publishing.complete, lease, None)
    assert units.lease(store, OWNER, TTL_S) is None
    assert plans.lease(store, OWNER, TTL_S) is not None, "of the next job alone"
    view = store.read(schedules.schedule_view, "hourly")
    assert view.last_good_at is None and view.samples is Samples.NEW
    outcomes = {run.job_id: run.outcome for run in store.read(schedules.past, "hourly")}
    assert outcomes[job] is RunOutcome.CUT_SHORT and len(outcomes) == 2


def test_a_job_whose_publishing_failed_is_published_again_with_each_slot(store: Store, clock: Clock) -> None:
    store.write(schedules.add, schedule())
    job = begin(store, clock, 1)
    commit(store, lease_unit(store))
    for _ in range(2):
        lease = publishing.lease(store, OWNER, TTL_S)
        assert lease is not None and lease.job_id == job
        stop_job(store, job, JobState.FAILED)
        clock.advance(HOUR_S)
        look(store)
        assert store.read(jobs.job, job).progress.samples_given_up == 0
        store.write(jobs.cancel, store.read(schedules.past, "hourly", limit=1)[0].job_id)


@pytest.mark.parametrize("all_lost", [False, True])
def test_samples_that_are_lost_with_a_host_are_taken_by_one_job(
    store: Store, clock: Clock, all_lost: bool
) -> None:
    """By the job that captures them again; by the next, where that one was ended without them."""
    store.write(hosts.register, "home", "home", is_home=True)
    far = store.write(hosts.register, "far", "far", is_home=False)
    store.write(schedules.add, schedule(request=REQUEST | {"hub": {"repo_id": "org/states"}}))
    job = begin(store, clock, 2 if all_lost else 3)
    for host in (far, far if all_lost else HOME):
        lease = units.lease(store, OWNER, TTL_S, prefer_job=job, host=host)
        assert lease is not None
        commit(store, lease)
    taken = {(job, 0), (job, 1)}
    if not all_lost:
        stop_job(store, job, JobState.FAILED)
        clock.advance(HOUR_S)
        look(store)
    assert store.read(jobs.state, job) is not JobState.FAILED
    assert store.write(hosts.forget, "far") == 1 + all_lost
    assert recorded(store) == taken, "this job captures them again, and no other may"
    if not all_lost:
        commit(store, lease_unit(store, job=job))
        assert recorded(store) == taken == committed(store, job)
        return
    stop_job(store, job, JobState.FAILED)
    clock.advance(HOUR_S)
    look(store)
    assert recorded(store) == committed(store, job) == set()
