"""What every consumer has goes, and is no longer held against its owner."""

import pytest
from sqlalchemy import update

from schemas.keys import NewKey, Scope
from service.errors import QuotaExceeded
from service.store import HOME, Store, commits, consumers, hosts, jobs, keys, workers
from service.store.clock import set_right
from service.store.tables import JOB
from tests.support.store_cases import Clock, commit, job_id, lease_unit, start_units


def test_what_every_consumer_has_counts_in_no_max_bytes(store: Store) -> None:
    start_units(store, units=1)
    with store.writing() as tx:
        tx.connection.execute(update(JOB).values(owner="ann", keeps_local=False))
    commit(store, lease_unit(store))
    num_bytes = store.read(jobs.job, job_id(1)).progress.bytes_written
    with store.writing() as tx:
        tx.connection.execute(update(JOB).values(request_bytes=10))
    limited = NewKey(name="ann", scopes=(Scope.JOBS_WRITE,), max_bytes=11)
    assert num_bytes > 1
    store.write(keys.add, "k-1", "0" * 64, limited)
    with pytest.raises(QuotaExceeded, match="max_bytes"):
        store.read(keys.check_bytes, "ann")
    last = store.read(commits.readable, job_id(1), after=-1, limit=1).next_after
    store.write(consumers.acknowledge, job_id(1), "one", last, None)
    store.read(keys.check_bytes, "ann")
    assert store.read(jobs.job, job_id(1)).progress.bytes_gone == num_bytes


def test_a_consumer_that_could_not_be_heard_is_waited_for_as_long_again(store: Store, clock: Clock) -> None:
    """1. Nobody heard either for a while. 2. One is back at once. 3. The other had its time, and is gone."""
    last = start_consumed(store)
    store.write(consumers.listens)
    for name in ("one", "other"):
        store.write(consumers.acknowledge, job_id(1), name, -1, 60)
    clock.advance(100)
    store.write(consumers.expire, job_id(1))
    assert store.write(consumers.acknowledge, job_id(1), "one", last, 60) == []
    assert left_after(store, clock, 50) == ["other", "one"]
    listen(store, clock, 20)
    assert len(store.write(consumers.acknowledge, job_id(1), "one", last, 60)) == 1


def test_a_consumer_is_silent_while_the_service_is_there_whatever_worker_is(
    store: Store, clock: Clock
) -> None:
    """1. A service alone, started again now and then. 2. A worker of the night finds a consumer gone."""
    store.write(hosts.register, "home", "machine", is_home=True)
    start_consumed(store)
    store.write(consumers.listens)
    store.write(consumers.acknowledge, job_id(1), "gone", -1, 60)
    for _ in range(4):
        listen(store, clock, 10)
        clock.advance(5)
        store.write(consumers.listens)
    store.write(workers.seen, HOME)
    store.write(consumers.expire, job_id(1))
    assert named(store) == []


@pytest.mark.parametrize("away_s", [30, 60, 3600])
def test_no_consumer_is_dropped_for_silence_while_there_was_no_service(
    store: Store, clock: Clock, away_s: int
) -> None:
    """1. The service is killed; a worker sweeps. 2. It is back. 3. The consumer has what was left."""
    store.write(hosts.register, "home", "machine", is_home=True)
    start_consumed(store)
    store.write(consumers.listens)
    store.write(consumers.acknowledge, job_id(1), "there", -1, 60)
    listen(store, clock, 30)
    for _ in range(3):
        clock.advance(away_s // 3)
        store.write(workers.seen, HOME)
        store.write(consumers.expire, job_id(1))
    store.write(consumers.listens)
    assert left_after(store, clock, 20) == ["there"]
    assert left_after(store, clock, 10) == []


@pytest.mark.parametrize("by_s", [86_400 * 365, -600])
def test_a_clock_that_is_set_leaves_a_consumer_the_time_that_it_had(
    store: Store, clock: Clock, by_s: int
) -> None:
    """1. The clock jumps. 2. One consumer speaks, another one does not. 3. The clock is set right."""
    start_consumed(store)
    store.write(consumers.listens)
    for name in ("quiet", "there"):
        store.write(consumers.acknowledge, job_id(1), name, -1, 60)
    clock.advance(by_s)
    listen(store, clock, 30)
    store.write(consumers.acknowledge, job_id(1), "there", -1, 60)
    clock.advance(-by_s)
    store.write(set_right, 60.0, 60.0)
    store.write(consumers.listens)
    assert left_after(store, clock, 0) == ["quiet", "there"]
    assert left_after(store, clock, 40) == ["there"]
    assert left_after(store, clock, 20) == []


@pytest.mark.parametrize("by_s", [-600, -70, 86_400])
def test_a_consumer_that_speaks_first_after_the_clock_was_set_is_heard(
    store: Store, clock: Clock, by_s: int
) -> None:
    """1. The clock is set. 2. A consumer speaks before the service says that it listens. 3. Another does."""
    last = start_consumed(store)
    store.write(consumers.listens)
    for name in ("first", "second"):
        store.write(consumers.acknowledge, job_id(1), name, -1, 60)
    listen(store, clock, 30)
    clock.advance(by_s)
    for name, place in (("first", -1), ("second", last)):
        assert store.write(consumers.acknowledge, job_id(1), name, place, 60) == []
    store.write(consumers.heard, job_id(1), "first", 60)
    assert left_after(store, clock, 50) == ["first", "second"]
    assert left_after(store, clock, 10) == []


def test_a_consumer_of_before_the_service_said_that_it_listens_has_its_time(
    store: Store, clock: Clock
) -> None:
    start_consumed(store)
    store.write(consumers.acknowledge, job_id(1), "there", -1, 60)
    clock.advance(10_000)
    store.write(consumers.listens)
    store.write(consumers.expire, job_id(1))
    assert named(store) == ["there"]


def test_the_service_is_none_of_the_hosts(store: Store) -> None:
    store.write(hosts.register, "home", "machine", is_home=True)
    store.write(consumers.listens)
    assert [host.id for host in store.read(hosts.views)] == ["home"]
    assert store.write(hosts.register, "scratch", "other", is_home=False) > HOME


def start_consumed(store: Store) -> int:
    """Start a job whose shards go once they are consumed; return the place of its only unit, captured."""
    start_units(store, units=1)
    with store.writing() as tx:
        tx.connection.execute(update(JOB).values(keeps_local=False))
    commit(store, lease_unit(store))
    return store.read(commits.readable, job_id(1), after=-1, limit=1).next_after


def named(store: Store) -> list[str]:
    return [one.name for one in store.read(consumers.of_job, job_id(1)).consumers]


def listen(store: Store, clock: Clock, seconds: int) -> None:
    """Let the service listen for a while."""
    for _ in range(seconds // 10):
        clock.advance(10)
        store.write(consumers.listens)


def left_after(store: Store, clock: Clock, seconds: int) -> list[str]:
    """Let the service listen for a while, then a worker sweep; return the consumers that are waited for."""
    listen(store, clock, seconds)
    store.write(consumers.expire, job_id(1))
    return named(store)
