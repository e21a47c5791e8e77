"""Hosts of a database: who takes the data folder's place."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Barrier

from service.store import HOME, Store, commits, hosts, units
from tests.support.store_cases import OWNER, TTL_S, commit, job_id, start_units

PROCESSES = 6


def test_processes_of_one_folder_that_start_at_once_are_one_host(store: Store) -> None:
    """1. All of a fresh database's. 2. All of a folder that takes the place of one that was given up."""
    for round_ in range(4):
        host_id = f"{round_:032x}"
        together = Barrier(PROCESSES)

        def register(host_id: str, together: Barrier, _: int) -> int:
            together.wait(30)
            return store.write(hosts.register, host_id, "name", is_home=True)

        with ThreadPoolExecutor(PROCESSES) as pool:
            given = list(pool.map(partial(register, host_id, together), range(PROCESSES)))
        assert given == [HOME] * PROCESSES
        assert store.write(hosts.forget, host_id) == 0


def test_a_reader_sees_no_unit_of_a_host_that_is_given_up_meanwhile_without_its_shards(
    store: Store, database: Store
) -> None:
    """A follower would take such a unit for one whose rows were all rejected, and go past it."""
    store.write(hosts.register, "a" * 32, "home", is_home=True)
    start_units(store, 1, repo_id="org/set")
    lease = units.lease(store, OWNER, TTL_S)
    assert lease is not None
    commit(store, lease)
    with store.reading() as tx:
        before = commits.readable(tx, job_id(1), after=0, limit=1)
        assert database.write(hosts.forget, "a" * 32) == 1
        assert commits.readable(tx, job_id(1), after=0, limit=1) == before
    assert before.units[0].shards
    assert not store.read(commits.readable, job_id(1), after=0, limit=1).units
