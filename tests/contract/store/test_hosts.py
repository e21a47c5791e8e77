"""Hosts of a database: who takes the data folder's place."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Barrier

from service.store import HOME, Store, hosts

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
