"""What every consumer has is no longer held against its owner."""

import pytest
from sqlalchemy import update

from schemas.keys import NewKey, Scope
from service.errors import QuotaExceeded
from service.store import Store, commits, consumers, jobs, keys
from service.store.tables import JOB
from tests.support.store_cases import commit, job_id, lease_unit, start_units


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
