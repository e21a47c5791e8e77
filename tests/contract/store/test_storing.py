"""What is stored in one commit, and when."""

from dataclasses import replace

from service.store import Store, StoreLease, UnitLease, commits, storing
from tests.support.store_cases import Clock, job_id, lease_unit, made, start_units

REPO = "org/data"
OWNER = "storer"
TTL_S = 60.0
RANKS = 8
APART_S = storing.APART.total_seconds()
LATEST_S = storing.LATEST.total_seconds()


def commit_of_ranks(store: Store, lease: UnitLease) -> None:
    """Commit a unit with a shard a rank."""
    whole = made(lease)
    shards = [whole.shards[0]] + [
        whole.shards[0].model_copy(update={"path": whole.shards[0].path + f"-r{rank}", "rows": 0})
        for rank in range(1, RANKS)
    ]
    store.write(commits.commit, replace(whole, shards=tuple(shards)), lease)


def capture(store: Store, units: int, number: int = 1) -> None:
    for _ in range(units):
        commit_of_ranks(store, lease_unit(store, job=job_id(number)))


def leased(store: Store, after_s: float, clock: Clock) -> StoreLease | None:
    clock.advance(after_s)
    return storing.lease(store, OWNER, TTL_S)


def waiting(store: Store) -> list[int]:
    made = store.read(commits.waiting, job_id(1), storing.FULL_FILES)
    assert sum(len(unit.files) for unit in made) <= storing.FULL_FILES
    return [unit.attempt_id.unit for unit in made]


def test_a_commit_is_full_by_its_files_and_not_by_its_units(store: Store, clock: Clock) -> None:
    """A unit has eight shards and an index: 11 of them are 99 files, and a twelfth waits for the next."""
    start_units(store, units=30, repo_id=REPO)
    capture(store, 11)
    assert leased(store, APART_S + 1, clock) is None, "99 files wait for more"
    capture(store, 1)
    lease = leased(store, APART_S + 1, clock)
    assert lease is not None and waiting(store) == list(range(11))
    store.write(storing.stored, lease, range(11))
    assert leased(store, APART_S + 1, clock) is None and waiting(store) == [11]
    capture(store, 11)
    lease = leased(store, APART_S + 1, clock)
    assert lease is not None
    store.write(storing.stored, lease, range(11, 12))
    assert leased(store, APART_S - 1, clock) is None
    assert leased(store, 1, clock) is None, "eleven units do not fill it"
    assert leased(store, LATEST_S, clock) is not None


def test_a_unit_of_more_files_than_a_commit_should_have_is_stored_alone(store: Store) -> None:
    start_units(store, units=3, repo_id=REPO)
    capture(store, 2)
    assert [u.attempt_id.unit for u in store.read(commits.waiting, job_id(1), RANKS)] == [0]
