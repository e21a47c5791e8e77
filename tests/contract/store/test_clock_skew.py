"""Hosts whose clocks differ agree on every lease, since the database's clock alone counts."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from schemas.job import JobState
from service.store import Store, jobs, migration, plans, units
from tests.support.pg import Postgres
from tests.support.store_cases import job_id, start_units, submit

ROOT = Path(__file__).parents[3]
UNITS, LEASE_S, SKEW_S = 40, 5.0, 120

WORKER = f"""
import sys, time
from service.store import Store, units
from service.work.keeper import Keeper
from tests.support.store_cases import commit

store, owner = Store(sys.argv[1]), sys.argv[2]
print(time.time(), flush=True)
with Keeper(Store(sys.argv[1]), {LEASE_S}) as keeper:
    while lease := units.lease(store, owner, {LEASE_S}):
        with keeper.keep(lease) as kept:
            time.sleep(0.05)
            kept.check()
            commit(store, lease)
"""


def test_workers_whose_clocks_differ_by_minutes_steal_no_lease(postgres: Postgres) -> None:
    """1. Two workers share units; one host's clock is two minutes ahead. 2. Each unit had one lease."""
    faketime = find_spec("libfaketime")
    assert faketime is not None and faketime.origin is not None, "run make install"
    library = Path(faketime.origin).parent / "vendor" / "libfaketime" / "src" / "libfaketime.so.1"
    with postgres.database() as url:
        store = Store(url)
        store.write(migration.migrate)
        start_units(store, units=UNITS)
        workers = [
            subprocess.Popen(
                [sys.executable, "-c", WORKER, url, f"{skew_s} s ahead"],
                cwd=ROOT,
                # The clock of the wall alone: no host's monotonic clock jumps.
                env={
                    **os.environ,
                    "LD_PRELOAD": str(library),
                    "FAKETIME": f"+{skew_s}s",
                    "FAKETIME_DONT_FAKE_MONOTONIC": "1",
                },
                stdout=subprocess.PIPE,
                text=True,
            )
            for skew_s in (0, SKEW_S)
        ]
        clocks = [float(worker.communicate(timeout=60)[0]) for worker in workers]
        assert clocks[1] - clocks[0] > SKEW_S / 2
        assert [worker.returncode for worker in workers] == [0, 0]
        rows = store.read(units.of_job, job_id(1))
        assert [(row.epoch, row.attempts, row.deaths) for row in rows] == [(1, 1, 0)] * UNITS
        store.close()


def test_times_are_the_databases_own(url: str) -> None:
    """A lease of zero seconds has run out for the next transaction, and one of a minute has not."""
    store = Store(url)
    store.write(migration.migrate)
    submit(store, 1)
    assert plans.lease(store, "first", 0.0) is not None
    assert plans.lease(store, "second", 60.0) is not None
    assert plans.lease(store, "third", 60.0) is None
    assert store.read(jobs.state, job_id(1)) is JobState.RUNNING
    store.close()
