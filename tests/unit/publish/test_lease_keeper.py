"""A publishing lease is kept while an upload runs, and its loss is told."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from service.errors import LeaseLost
from service.publish.lease_keeper import LeaseKeeper
from service.store import PublishLease, Store
from tests.support.finished_job import JOB, OWNER, a_request, run_to_publishing
from tests.support.store_cases import Beats, Clock

LEASE_S = 60.0
TTL_S = 0.03


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(tmp_path: Path, clock: Clock) -> Iterator[Store]:
    store = Store(f"sqlite:///{tmp_path / 'quarry.db'}", clock)
    store.migrate()
    run_to_publishing(store, tmp_path / "dataset", JOB, a_request())
    yield store
    store.close()


@pytest.fixture
def lease(store: Store) -> PublishLease:
    lease = store.lease_publish(OWNER, LEASE_S)
    assert lease is not None
    return lease


def test_a_lease_outlives_its_time_while_it_is_kept(store: Store, lease: PublishLease, clock: Clock) -> None:
    beats = Beats(clock, lambda: store.lease_publish("another", LEASE_S))
    keeper = LeaseKeeper(store, lease, LEASE_S)
    keeper._done = beats
    with keeper:
        assert beats.over.wait(60)
        keeper.check()
    assert beats.taken is None
    assert len(beats.waits_s) == 10 and max(beats.waits_s) <= LEASE_S / 2


def test_a_lease_that_is_lost_is_told_at_the_next_look(store: Store, lease: PublishLease) -> None:
    with LeaseKeeper(store, lease, TTL_S) as keeper:
        keeper.check()
        store.cancel(JOB)
        with pytest.raises(LeaseLost):
            while True:
                keeper.check()


def test_the_keeper_ends_with_its_context(store: Store, lease: PublishLease) -> None:
    with LeaseKeeper(store, lease, 600.0) as keeper:
        keeper.check()
    keeper.check()
