"""What the pages read of a job and of the hosts, beside what the API reads too."""

from dataclasses import replace

import pytest
from sqlalchemy import update

from schemas.worker import WorkerStatus
from service.errors import EngineDied, NotFound, Outcome
from service.store import HOME, NewJob, Store, TaskState, commits, hosts, jobs, storing, tasks, units, workers
from service.store.tables import JOB
from service.store.workers import PAUSES
from tests.support.store_cases import (
    CHECKS,
    OWNER,
    PROBLEM,
    TTL_S,
    Clock,
    a_request,
    capture,
    commit,
    job_id,
    lease_unit,
    made,
    reject,
    start_units,
)


def test_the_newest_events_are_those_of_the_job_newest_first(store: Store) -> None:
    for number in (1, 2):
        start_units(store, number=number)
    every = store.read(jobs.events, job_id(1))
    assert len(every) > 3
    assert store.read(jobs.recent_events, job_id(1), 3) == every[:-4:-1]
    assert store.read(jobs.recent_events, job_id(1), 500) == every[::-1]
    assert store.read(jobs.recent_events, job_id(3), 3) == []


def test_events_are_counted_by_owner(store: Store) -> None:
    assert store.read(jobs.num_events) == (0, 0)
    for number, owner in enumerate(("ada", "bob"), 1):
        store.write(jobs.submit, NewJob.of(job_id(number), owner, a_request()))
        with store.writing() as tx:
            tx.connection.execute(update(JOB).where(JOB.c.id == job_id(number)).values(owner=owner))
    before = [store.read(jobs.num_events, owner) for owner in ("ada", "bob", None)]
    store.write(jobs.pause, job_id(2))
    after = [store.read(jobs.num_events, owner) for owner in ("ada", "bob", None)]
    assert [number for _, number in after] == [1, 1, 2]
    assert [one != other for one, other in zip(before, after, strict=True)] == [False, True, True]


def test_the_head_of_a_request_is_its_beginning(store: Store) -> None:
    store.write(jobs.submit, NewJob.of(job_id(1), "key", a_request("a" * 1000)))
    whole = store.read(jobs.request_json, job_id(1))
    assert store.read(jobs.request_head, job_id(1), 500) == whole[:500]
    assert store.read(jobs.request_head, job_id(1), 10_000) == whole
    assert store.read(jobs.request_head, job_id(2), 500) == ""


def test_open_units_are_those_in_work_and_then_the_one_that_failed(store: Store) -> None:
    """1. Of five units three are in work. 2. One of them fails the job, which gives the others back."""
    start_units(store, units=5)
    start_units(store, units=1, number=2)
    leases = [lease_unit(store, f"worker-{number}", job_id(1)) for number in range(4)]
    commit(store, leases[0])
    seen = store.read(units.open_units, job_id(1), 20)
    assert [(one.unit, one.state) for one in seen] == [(unit, TaskState.LEASED) for unit in (1, 2, 3)]
    assert store.read(units.open_units, job_id(1), 2) == seen[:2]
    assert store.read(units.in_work, job_id(1)) == 3
    store.write(tasks.fail, leases[3], PROBLEM, Outcome.FAIL, max_attempts=1)
    (failed,) = store.read(units.open_units, job_id(1), 20)
    assert (failed.unit, failed.state, failed.problem) == (3, TaskState.FAILED, PROBLEM)
    for number in (1, 2):
        assert store.read(units.in_work, job_id(number)) == 0
    assert store.read(units.open_units, job_id(2), 9) == []


def test_the_last_checks_are_of_the_units_with_the_highest_numbers(store: Store) -> None:
    start_units(store, units=3)
    for number in range(3):
        lease = lease_unit(store, job=job_id(1))
        checks = CHECKS.model_copy(update={"rows_checked": lease.item})
        assert number == lease.item
        store.write(commits.commit, replace(made(lease), checks=checks), lease)
    assert [one.rows_checked for one in store.read(commits.last_checks, job_id(1), 2)] == [2, 1]
    assert store.read(commits.last_checks, job_id(2), 2) == []


def test_a_unit_can_be_read_once_it_is_committed(store: Store) -> None:
    start_units(store, units=2)
    first, second = (lease_unit(store, f"worker-{number}", job_id(1)) for number in range(2))
    commit(store, second)
    assert store.read(commits.readable_unit, job_id(1), 0) is None
    seen = store.read(commits.readable_unit, job_id(1), 1)
    assert seen is not None
    assert (seen.unit, seen.shards, seen.in_folder, seen.in_repository) == (
        1,
        made(second).shards,
        True,
        False,
    )
    commit(store, first, [reject(number) for number in range(first.num_samples)])
    assert store.read(commits.readable_unit, job_id(1), 0).shards == ()  # type: ignore[union-attr]
    assert store.read(commits.readable_unit, job_id(1), 7) is None
    with pytest.raises(NotFound):
        store.read(commits.readable, job_id(2), after=-1, limit=1)


def test_hosts_are_shown_with_their_workers_and_what_they_have_to_store(store: Store, clock: Clock) -> None:
    """1. A job that is pushed, and one that is not, are captured at home. 2. Another host falls silent."""
    home = store.write(hosts.register, "a" * 32, "home", is_home=True)
    away = store.write(hosts.register, "b" * 32, "away", is_home=False)
    assert home == HOME
    status = WorkerStatus(engine="vllm 0.32.0", job=job_id(1))
    store.write(workers.beat, OWNER, TTL_S, host=home, status=status, waits="disk")
    store.write(workers.beat, "other", 2 * TTL_S, host=away)
    capture(store, units=2, number=1, repo_id="org/data")
    capture(store, units=1, number=2)
    seen_home, seen_away = store.read(hosts.views)
    assert (seen_home.id, seen_home.is_home, seen_home.units_to_store) == ("a" * 32, True, 2)
    assert seen_home.bytes_to_store == 4000
    (worker,) = seen_home.workers
    assert (worker.name, worker.engine, worker.job, worker.waits) == (OWNER, "vllm 0.32.0", job_id(1), "disk")
    assert [worker.name for worker in seen_away.workers] == ["other"]
    assert (seen_away.is_home, seen_away.units_to_store, seen_away.bytes_to_store) == (False, 0, 0)
    clock.advance(TTL_S)
    assert store.read(hosts.views)[0].workers == ()
    clock.advance(TTL_S)
    assert [one.id for one in store.read(hosts.views)] == ["a" * 32]


def test_a_job_waits_for_an_engine_while_those_that_hold_its_units_have_none(store: Store) -> None:
    """1. A worker with an engine does nothing. 2. Two start theirs for a job. 3. One of them is ready."""
    home = store.write(hosts.register, "a" * 32, "home", is_home=True)
    start_units(store, number=1)
    holding = WorkerStatus(job=job_id(1), units=1)
    ready = holding.model_copy(update={"engine": "vllm 0.32.0"})
    waits = []
    for owner, status in (
        ("idle", WorkerStatus(job=job_id(1), engine="vllm 0.32.0")),
        ("one", holding),
        ("two", holding),
        ("one", ready),
    ):
        store.write(workers.beat, owner, TTL_S, host=home, status=status)
        waits.append(store.read(jobs.job, job_id(1)).waits)
    starts = "an engine that starts and loads the model"
    assert waits == [None, starts, starts, None]


def test_why_a_worker_rests_from_a_model_quotes_no_other_owners_job(store: Store, clock: Clock) -> None:
    owners = {1: "ada", 2: "ada", 3: "bob", 4: None}
    for number, owner in owners.items():
        start_units(store, number=number)
        with store.writing() as tx:
            tx.connection.execute(update(JOB).where(JOB.c.id == job_id(number)).values(owner=owner))
    for _ in PAUSES:
        clock.advance(10)
        died = EngineDied("of a template of ada's")
        lease = lease_unit(store, job=job_id(1))
        store.write(workers.engine_died, lease, died, 3600.0, alone=False, sound=False)
    waits = [str(store.read(jobs.job, job_id(number)).waits) for number in owners]
    assert all("'s engine dies" in said for said in waits)
    assert [said.endswith(died.detail) for said in waits] == [True, True, False, True]


def test_what_waits_to_leave_the_data_folder_is_of_jobs_whose_shards_go(store: Store) -> None:
    capture(store, units=2, number=1, repo_id="org/data")
    assert store.read(storing.unstored, HOME) == (0, 0, 0)
    store.write(lambda tx: tx.connection.execute(update(JOB).values(keeps_local=False)))
    assert store.read(storing.unstored, HOME) == (4000, 2, 0)
    store.write(jobs.pause, job_id(1))
    assert store.read(storing.unstored, HOME) == (4000, 2, 2)
    assert store.read(storing.unstored, HOME + 1) == (0, 0, 0)
