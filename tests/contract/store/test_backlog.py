"""What an operator watches: totals that never fall, and how long tasks and captured units have waited."""

import socket
from datetime import UTC, datetime

import pytest

from schemas.job import Progress
from schemas.worker import Role, WorkerStatus
from service.errors import Outcome
from service.store import (
    Store,
    backlog,
    deletion,
    hosts,
    jobs,
    publishing,
    tasks,
    totals,
    units,
    workers,
)
from service.store.values import TaskKind
from tests.support.store_cases import (
    OWNER,
    PROBLEM,
    TTL_S,
    Clock,
    capture,
    commit,
    job_id,
    lease_publish,
    lease_unit,
    start_units,
    submit,
)

SCRATCH = "b" * 32


def test_totals_are_the_sums_over_all_jobs_and_stay_when_jobs_are_deleted(store: Store) -> None:
    assert store.read(totals.totals) == Progress()
    for number, num_units in ((1, 2), (2, 1)):
        capture(store, units=num_units, number=number)
        store.write(publishing.complete, lease_publish(store), None)
    before = store.read(totals.totals)
    assert (before.units_done, before.samples_written, before.tokens_written) == (3, 6, 30)
    for number in (1, 2):
        store.write(deletion.begin, job_id(number), with_dataset=True)
        while store.write(deletion.forget, job_id(number)):
            pass
    assert store.read(jobs.page)[0] == []
    assert store.read(totals.totals) == before


def test_what_a_lost_host_had_captured_is_counted_again_when_it_is_captured_again(store: Store) -> None:
    store.write(hosts.register, "a" * 32, "home", is_home=True)
    scratch = store.write(hosts.register, SCRATCH, "node", is_home=False)
    start_units(store, units=2, repo_id="org/data")
    lease = units.lease(store, OWNER, TTL_S, host=scratch)
    assert lease is not None
    commit(store, lease)
    before = store.read(totals.totals)
    assert store.write(hosts.forget, SCRATCH) == 1
    assert store.read(totals.totals) == before
    commit(store, lease_unit(store))
    again = store.read(totals.totals)
    assert (again.units_done, again.bytes_written) == (2 * before.units_done, 2 * before.bytes_written)
    assert store.read(jobs.job, job_id(1)).progress.units_done == 1


def test_a_unit_that_failed_stays_counted_when_it_is_tried_again_and_when_its_job_is_deleted(
    store: Store,
) -> None:
    for failures in (1, 2):
        start_units(store) if failures == 1 else store.write(jobs.resume, job_id(1))
        store.write(tasks.fail, lease_unit(store), PROBLEM, Outcome.FAIL, 1)
        assert store.read(jobs.job, job_id(1)).progress.units_failed == 1
        assert store.read(totals.totals).units_failed == failures
    store.write(deletion.begin, job_id(1), with_dataset=True)
    while store.write(deletion.forget, job_id(1)):
        pass
    assert store.read(totals.totals).units_failed == 2


def test_a_task_waits_while_nothing_happens_in_its_job(store: Store, clock: Clock) -> None:
    """1. A job waits. 2. Its units wait. 3. Both are leased. 4. Their owners die. 5. A pause ends it."""
    none = dict.fromkeys(TaskKind, 0.0)
    assert (store.read(backlog.runnable), store.read(backlog.leased)) == (none, {})
    submit(store, 2)
    clock.advance(30)
    assert store.read(backlog.runnable) == none | {TaskKind.PLAN: 30.0}
    store.write(jobs.pause, job_id(2))
    assert store.read(backlog.runnable) == none
    start_units(store, units=3)
    clock.advance(10)
    assert store.read(backlog.runnable) == none | {TaskKind.CAPTURE: 10.0}
    lease_unit(store)
    clock.advance(7)
    lease_unit(store)
    assert lease_unit(store, "another").item == 2
    clock.advance(5)
    assert store.read(backlog.runnable) == none
    ages = {(TaskKind.CAPTURE, OWNER): 12.0, (TaskKind.CAPTURE, "another"): 5.0}
    assert store.read(backlog.leased) == ages
    clock.advance(TTL_S)
    assert store.read(backlog.runnable) == none | {TaskKind.CAPTURE: TTL_S + 5}
    assert store.read(backlog.leased) == {}
    store.write(jobs.pause, job_id(1))
    assert store.read(backlog.runnable) == none


@pytest.mark.parametrize("limit", [None, 10_000])
def test_a_host_holds_what_its_repositories_have_not(store: Store, clock: Clock, limit: int | None) -> None:
    """Neither what is stored, nor what stays in the data folder; nothing of a stopped job is late."""
    store.write(hosts.register, "a" * 32, "home", is_home=True)
    scratch = store.write(hosts.register, SCRATCH, "node", is_home=False)
    store.write(hosts.register, "c" * 32, "idle", is_home=False)
    status = WorkerStatus(roles=(Role.CAPTURE, Role.STORE), scratch_bytes=limit)
    store.write(workers.beat, OWNER, TTL_S, host=scratch, status=status)
    capture(store, units=2, number=1)  # pushed nowhere
    start_units(store, units=3, number=2, repo_id="org/data")
    first = datetime.fromtimestamp(clock.now_s, UTC)
    for _ in range(2):
        lease = units.lease(store, OWNER, TTL_S, prefer_job=job_id(2), host=scratch)
        assert lease is not None
        commit(store, lease)
        clock.advance(10)
    home, node = store.read(hosts.views)
    assert (home.id, home.units_to_store, home.to_store_since) == ("a" * 32, 0, None)
    assert (home.scratch_used_bytes, home.scratch_limit_bytes) == (None, None)
    assert (node.id, node.name) == (SCRATCH, socket.gethostname())
    assert (node.units_to_store, node.bytes_to_store, node.to_store_since) == (2, 4000, first)
    assert (node.scratch_used_bytes, node.scratch_limit_bytes) == (limit and 4000, limit)
    store.write(jobs.pause, job_id(2))
    _, node = store.read(hosts.views)
    assert (node.units_to_store, node.bytes_to_store, node.to_store_since) == (2, 4000, None)
