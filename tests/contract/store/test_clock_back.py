"""A database's clock that was ahead and is set right holds no work up for the difference."""

from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest
from sqlalchemy import select

from schemas.job import JobState
from schemas.schedule import RunOutcome
from service.errors import EngineDied, WriteFailed
from service.settings import Settings
from service.store import Store, hosts, jobs, plans, schedules, storing, tasks, units, workers
from service.store.tables import HOST
from tests.contract.store.test_schedules import HOUR_S, at, end_jobs, look, outcomes, schedule, submitted
from tests.support.roles import sweep
from tests.support.store_cases import TTL_S, Clock, commit, lease_plan, lease_unit, start_units, submit

AHEAD_S = 8 * 3600.0
REST_S = 3600.0


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(data_dir=tmp_path / "data", lease_s=TTL_S, engine_rest_s=REST_S)


def plan_that_waits(store: Store) -> Callable[[], object]:
    submit(store)
    store.write(tasks.fail, lease_plan(store), WriteFailed("why").problem(), WriteFailed.outcome, 3)
    return lambda: plans.lease(store, "late", TTL_S)


def unit_of_a_dead_worker(store: Store) -> Callable[[], object]:
    start_units(store, units=1)
    lease_unit(store, "dead")
    return lambda: units.lease(store, "late", TTL_S)


def worker_that_rests(store: Store) -> Callable[[], object]:
    start_units(store, units=1)
    died = EngineDied("why")
    store.write(workers.engine_died, lease_unit(store, "sick"), died, REST_S, alone=False, sound=False)
    return lambda: units.lease(store, "sick", TTL_S)


def repository_that_was_committed_to(store: Store) -> Callable[[], object]:
    start_units(store, units=2, repo_id="org/data")
    commit(store, lease_unit(store))
    store.write(lambda tx: tasks.pause(tx, "org/data", storing.APART))

    def commits_again() -> bool:
        lease = storing.lease(store, "late", TTL_S)
        return lease is not None and store.write(storing.take_turn, lease) == 0.0

    return commits_again


def worker_that_is_gone(store: Store) -> Callable[[], object]:
    store.write(workers.beat, "dead", TTL_S)
    return lambda: not store.read(workers.present)


def host_that_is_silent(store: Store) -> Callable[[], object]:
    far = store.write(hosts.register, "b" * 32, "far", is_home=False)
    seen_at = select(HOST.c.seen_at).where(HOST.c.number == far)
    return lambda: store.read(lambda tx: tx.connection.scalars(seen_at).one() < tx.now)


@pytest.mark.parametrize(
    "begin",
    [
        plan_that_waits,
        unit_of_a_dead_worker,
        worker_that_rests,
        repository_that_was_committed_to,
        worker_that_is_gone,
        host_that_is_silent,
    ],
)
def test_what_waits_does_so_no_longer_than_it_ever_may(
    store: Store, clock: Clock, settings: Settings, begin: Callable[[Store], Callable[[], object]]
) -> None:
    """1. The clock is hours ahead. 2. Something is to last for a while. 3. It is set right, and swept."""
    sweep(store, settings)  # the folder is the database's
    clock.advance(AHEAD_S)
    goes_on = begin(store)
    clock.advance(-AHEAD_S)
    assert not goes_on()
    sweep(store, settings)
    clock.advance(600.0)
    assert goes_on()


@pytest.mark.parametrize("begin", [plan_that_waits, unit_of_a_dead_worker, worker_that_rests])
def test_a_wait_of_the_right_length_is_left_alone(
    store: Store, settings: Settings, begin: Callable[[Store], Callable[[], object]]
) -> None:
    goes_on = begin(store)
    sweep(store, settings)
    assert not goes_on()


@pytest.mark.parametrize("overlap", ["queue", "replace"])
@pytest.mark.parametrize("ends_at", [None, at(11)])
def test_slots_that_a_clock_ahead_has_decided_come_at_their_time(
    store: Store, clock: Clock, settings: Settings, overlap: str, ends_at: datetime | None
) -> None:
    """1. A clock ahead decides slots; one of them becomes a job. 2. It is set right, and swept.

    3. The slots come, and the one that is a job stays that job, which goes on.
    """
    sweep(store, settings)
    store.write(schedules.add, schedule(overlap=overlap, ends_at=ends_at))
    clock.advance(3 * HOUR_S)
    look(store)
    assert outcomes(store) == [(at(9), RunOutcome.MISSED), (at(11), RunOutcome.SUBMITTED)]
    clock.advance(-3 * HOUR_S)
    sweep(store, settings)
    assert outcomes(store) == [(at(11), RunOutcome.SUBMITTED)]
    end_jobs(store)
    for _ in range(2):
        clock.advance(HOUR_S)
        look(store)
        end_jobs(store)
    clock.advance(HOUR_S)
    look(store)
    assert submitted(store) == [at(9), at(10), at(11)]
    assert len(store.read(jobs.page)[0]) == 3


@pytest.mark.parametrize("overlap", ["queue", "replace", "skip"])
def test_a_slot_that_comes_again_leaves_its_own_job_alone(
    store: Store, clock: Clock, settings: Settings, overlap: str
) -> None:
    """1. A slot becomes a job. 2. The clock is set back and swept. 3. The slot comes again, then the next."""
    sweep(store, settings)
    store.write(schedules.add, schedule(overlap=overlap))
    clock.advance(HOUR_S)
    look(store)
    clock.advance(-600.0)
    sweep(store, settings)
    clock.advance(600.0)
    look(store)
    assert [job.state for job in store.read(jobs.page)[0]] == [JobState.QUEUED]
    end_jobs(store)
    look(store)
    clock.advance(HOUR_S)
    look(store)
    assert submitted(store) == [at(9), at(10)]
