"""What every consumer has goes, and is no longer held against its owner."""

import pytest
from sqlalchemy import update

from schemas.keys import NewKey, Scope
from service.errors import QuotaExceeded
from service.store import HOME, Store, commits, consumers, hosts, jobs, keys, workers
from service.store.tables import JOB
from tests.support.store_cases import TTL_S, Clock, commit, job_id, lease_unit, start_units


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
    store.write(hosts.register, "home", "machine", is_home=True)
    start_units(store, units=1)
    with store.writing() as tx:
        tx.connection.execute(update(JOB).values(keeps_local=False))
    commit(store, lease_unit(store))
    last = store.read(commits.readable, job_id(1), after=-1, limit=1).next_after
    for name in ("one", "other"):
        store.write(consumers.acknowledge, job_id(1), name, -1, 3600)
    clock.advance(4000)
    store.write(consumers.expire, job_id(1))
    assert store.write(consumers.acknowledge, job_id(1), "one", last, 3600) == []
    for _ in range(60):
        store.write(workers.seen, HOME)
        store.write(consumers.expire, job_id(1))
        clock.advance(TTL_S)
    assert len(store.read(consumers.of_job, job_id(1)).consumers) == 2
    store.write(workers.seen, HOME)
    assert len(store.write(consumers.acknowledge, job_id(1), "one", last, 3600)) == 1
