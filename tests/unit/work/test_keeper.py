"""Leases are kept while their work runs, over a database that is away, and their loss is known."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from service.errors import DiskFull, LeaseLost, QuarryError, StoreUnavailable
from service.store import Lease, Store, Transaction, jobs, migration, publishing, tasks, units
from service.work.keeper import Keeper, Stopped
from tests.support.store_cases import OWNER, TTL_S, Beats, Clock, capture, job_id, lease_publish, start_units

ROOT = Path(__file__).parents[3]
AWAY, FULL = StoreUnavailable("away"), DiskFull("full")
SHORT_S = 0.05

ENDS_DURING_AN_UPLOAD = """
import threading
from service.work.keeper import Keeper, Stopped

def upload():
    with Keeper(None, 600.0):
        uploading.set()
        threading.Event().wait()

uploading = threading.Event()
threading.Thread(target=upload, daemon=True).start()
uploading.wait()
"""


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(tmp_path: Path, clock: Clock) -> Iterator[Store]:
    opened = Store(f"sqlite:///{tmp_path / 'quarry.db'}", clock.of(f"sqlite:///{tmp_path / 'quarry.db'}"))
    opened.write(migration.migrate)
    yield opened
    opened.close()


def fail_at(monkeypatch: pytest.MonkeyPatch, *met: Exception | None) -> threading.Event:
    """Let extensions of leases meet these, one after the other; the event is set after the last."""
    left, over, extend = iter(met), threading.Event(), tasks.extend

    def extended(tx: Transaction, leases: list[Lease], ttl_s: float) -> list[Lease]:
        error = next(left, over)
        if error is over:
            over.set()
        elif error is not None:
            raise error
        return extend(tx, leases, ttl_s)

    monkeypatch.setattr(tasks, "extend", extended)
    return over


def test_leases_outlive_their_time_while_they_are_kept(store: Store, clock: Clock) -> None:
    start_units(store, units=2)
    leases = [units.lease(store, OWNER, TTL_S) for _ in range(2)]
    beats = Beats(clock, lambda: units.lease(store, "another", TTL_S))
    keeper = Keeper(store, TTL_S)
    keeper._done = beats
    with keeper, keeper.keep(leases[0]) as first, keeper.keep(leases[1]) as second:
        assert beats.over.wait(60)
        first.check()
        second.check()
    assert beats.taken is None
    assert len(beats.waits_s) == 10 and max(beats.waits_s) <= TTL_S / 2


def test_one_of_two_leases_is_lost_and_its_owner_is_called_once(store: Store) -> None:
    start_units(store, number=1)
    start_units(store, number=2)
    losses: list[str] = []
    called = threading.Event()

    def on_lost() -> None:
        losses.append("lost")
        called.set()

    first, second = (units.lease(store, OWNER, TTL_S, prefer_job=job_id(number)) for number in (1, 2))
    keeper = Keeper(store, SHORT_S)
    with keeper, keeper.keep(first, on_lost) as lost, keeper.keep(second) as held:
        store.write(jobs.cancel, job_id(1))
        assert called.wait(60)
        with pytest.raises(LeaseLost):
            lost.check()
        held.check()
    assert losses == ["lost"]


def test_a_lease_that_is_kept_no_more_is_not_extended(store: Store, clock: Clock) -> None:
    capture(store)
    keeper = Keeper(store, TTL_S)
    with keeper.keep(lease_publish(store)):
        pass
    clock.advance(TTL_S)
    keeper.beat()
    assert publishing.lease(store, "another", TTL_S) is not None


def test_a_loss_that_comes_after_the_end_of_the_block_is_nobodys(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    capture(store)
    losses: list[str] = []
    keeper = Keeper(store, TTL_S)
    keeping = keeper.keep(lease_publish(store), lambda: losses.append("lost"))

    def ended_meanwhile(tx: Transaction, leases: list[Lease], ttl_s: float) -> list[Lease]:
        keeping.__exit__(None, None, None)
        return leases

    keeping.__enter__()
    monkeypatch.setattr(tasks, "extend", ended_meanwhile)
    keeper.beat()
    assert losses == []


def test_a_database_that_is_away_for_many_leases_ends_nothing(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. The database is away for five times the lease. 2. It is back, and the lease is still ours."""
    capture(store)
    back = fail_at(monkeypatch, *[AWAY, FULL] * 10)
    with Keeper(store, SHORT_S) as keeper, keeper.keep(lease_publish(store)) as kept:
        assert back.wait(60)
        kept.check()
        kept.confirm()


def test_a_step_that_nothing_fences_waits_for_a_lease_that_is_confirmed(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. The database is away for longer than the lease. 2. When it is back, the lease is another's."""
    capture(store)
    fail_at(monkeypatch, *[AWAY] * 10)
    stop = threading.Event()
    stopping = {"stopped": stop.is_set}
    with Keeper(store, SHORT_S) as keeper, keeper.keep(lease_publish(store), **stopping) as kept:
        kept.extended_s -= 1.0
        stop.set()
        with pytest.raises(Stopped):
            kept.confirm()
        stop.clear()
        store.write(jobs.cancel, job_id(1))
        with pytest.raises(LeaseLost):
            kept.confirm()


def test_a_keeper_that_ended_by_a_bug_keeps_nothing_and_says_so(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    capture(store)
    fail_at(monkeypatch, ZeroDivisionError("a bug"))
    with Keeper(store, SHORT_S) as keeper, keeper.keep(lease_publish(store)) as kept:
        keeper._thread.join(60)
        with pytest.raises(QuarryError, match="no longer kept"):
            keeper.check()
        with pytest.raises(Stopped):
            kept.check()


def test_a_process_that_ends_during_an_upload_does_not_wait_for_its_keeper() -> None:
    subprocess.run([sys.executable, "-c", ENDS_DURING_AN_UPLOAD], cwd=ROOT, check=True, timeout=60)
