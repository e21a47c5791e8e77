"""Many at once: threads and processes never get the same thing twice. For counters see `test_stress.py`."""

import multiprocessing
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, repeat
from multiprocessing.synchronize import Barrier as ProcessBarrier
from typing import TypeVar

import pytest

from schemas.job import JobState
from service.errors import IllegalMove, LeaseLost
from service.store import (
    NewJob,
    Store,
    commits,
    jobs,
    plans,
    publishing,
    tasks,
    units,
)
from tests.support.store_cases import (
    CLOCK,
    OWNER,
    TTL_S,
    Clock,
    a_request,
    capture,
    commit,
    job_id,
    lease_unit,
    made,
    start_units,
    submit,
)

THREADS = 8
Result = TypeVar("Result")


def together(act: Callable[[int], Result], threads: int = THREADS) -> list[Result]:
    """Return what `act(number)` returns in every thread; they begin at the same time."""
    gate = threading.Barrier(threads)

    def one(number: int) -> Result:
        gate.wait()
        return act(number)

    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(one, range(threads)))


def lease_all(store: Store, owner: str) -> list[tuple[str, int, int]]:
    """Lease until nothing is left; return job, unit and epoch of each."""
    leases = []
    while lease := units.lease(store, owner, TTL_S):
        leases.append((lease.attempt_id.job_id, lease.attempt_id.unit, lease.attempt_id.epoch))
    return leases


def test_threads_take_over_expired_leases_once_each(store: Store, clock: Clock) -> None:
    start_units(store, units=60)
    lease_all(store, "zombie")
    clock.advance(TTL_S)
    leases = together(lambda number: lease_all(store, f"thread-{number}"))
    assert sorted(chain.from_iterable(leases)) == [(job_id(1), unit, 2) for unit in range(60)]


def lease_in_process(
    url: str, name: str, gate: ProcessBarrier, found: "multiprocessing.Queue[object]"
) -> None:
    store = Store(url, CLOCK)
    gate.wait()
    found.put(lease_all(store, name))
    store.close()


@pytest.mark.slow
def test_processes_that_lease_the_same_units_get_each_once(store: Store, url: str) -> None:
    start_units(store, units=60)
    spawning = multiprocessing.get_context("spawn")
    gate, found = spawning.Barrier(3), spawning.Queue()
    processes = [
        spawning.Process(target=lease_in_process, args=(url, f"process-{number}", gate, found))
        for number in range(3)
    ]
    for process in processes:
        process.start()
    leases = [found.get() for _ in processes]
    for process in processes:
        process.join()
    found.close()
    found.join_thread()
    assert sorted(chain.from_iterable(leases)) == [(job_id(1), unit, 1) for unit in range(60)]


def test_of_two_planners_one_gets_the_job(store: Store) -> None:
    submit(store)
    leases = together(lambda number: plans.lease(store, f"thread-{number}", TTL_S))
    assert len([lease for lease in leases if lease is not None]) == 1


def test_planners_get_different_jobs(store: Store) -> None:
    for number in range(THREADS):
        submit(store, number)
    leases = together(lambda number: plans.lease(store, f"thread-{number}", TTL_S))
    assert {lease.job_id for lease in leases if lease} == {job_id(number) for number in range(THREADS)}


def test_of_many_publishers_to_one_repository_one_gets_a_lease(store: Store) -> None:
    for number in range(4):
        capture(store, number=number, repo_id="org/data")
    for turn in range(4):
        leases = together(lambda number: publishing.lease(store, f"thread-{number}", TTL_S))
        (lease,) = [lease for lease in leases if lease is not None]
        assert (lease.job_id, lease.epoch) == (job_id(turn), 1)
        store.write(publishing.complete, lease, None)


def test_the_same_key_sent_many_times_at_once_is_one_job(store: Store) -> None:
    answers = together(lambda number: store.write(jobs.submit, NewJob.of(job_id(1), "key", a_request())))
    assert sorted(created for _, created in answers) == [False] * (THREADS - 1) + [True]
    assert {row.id for row, _ in answers} == {job_id(1)}


def test_of_many_commits_of_one_attempt_one_is_taken(store: Store) -> None:
    start_units(store, units=1)
    lease = lease_unit(store)

    def act(number: int) -> bool:
        try:
            commit(store, lease)
        except LeaseLost:
            return False
        return True

    assert sum(together(act)) == 1
    assert store.read(commits.unit_commits, job_id(1)) == [made(lease)]
    assert store.read(jobs.job, job_id(1)).progress.units_done == 1


@pytest.mark.slow
def test_beats_and_stops_at_once_never_wait_for_each_other_for_ever(store: Store) -> None:
    """Beats over several jobs, in opposite orders, against cancel and resume of the same jobs."""
    numbers = (1, 2, 3)
    for number in numbers:
        start_units(store, units=10, number=number)
    leases = []
    while lease := units.lease(store, OWNER, TTL_S):
        leases.append(lease)

    def act(number: int) -> None:
        for _ in repeat(None, 10):
            if number % 2:
                store.write(tasks.extend, leases if number % 4 == 1 else leases[::-1], TTL_S)
            else:
                for job in numbers if number % 4 else numbers[::-1]:
                    for verb in (jobs.cancel, jobs.resume):
                        try:
                            store.write(verb, job_id(job))
                        except IllegalMove:
                            continue

    together(act, threads=4)
    assert store.write(tasks.extend, leases, TTL_S) == leases
    assert all(
        store.read(jobs.state, job_id(number)) in (JobState.QUEUED, JobState.CANCELLED) for number in numbers
    )
    assert all(row.attempts == 0 for number in numbers for row in store.read(units.of_job, job_id(number)))
