"""Makes the frozen databases, with jobs in flight and the data folder that belongs to them. No test runs it.

    PYTHONPATH=CHECKOUT python make_databases.py FOLDER REVISION sqlite|postgresql   # in tests/frozen

writes `FOLDER/REVISION-sqlite.sql` or `FOLDER/REVISION-postgresql.sql`, and `FOLDER/data`, by the code of
CHECKOUT, which must be the last whose newest migration is REVISION:

- 0001 was written by the code of commit 7e4c320, 0003 by that of a10d51d, and 0004 by that of 29c500a;
- 0005 and 0006 were migrated from 0004 by the code of their time;
- 0002 was never the newest migration of any code, because it came together with 0003: the tests make it from
  0001, by the migration itself.

One data folder serves all: that of 0001 on SQLite. The others' were the same byte for byte, but for what
the job `blocked` left in `attempts/` and for the last digits of `mean_rms` in the manifest of `completed`.
The jobs are named for where they are:

- queued: nobody has looked at it;
- planning: its planner was killed after the first unit;
- planned: all its units wait;
- leased: one unit done, one leased by a worker that was killed while it wrote, after another that was; the
  third leased by one that was killed before it wrote;
- publishing: all units done, its publisher killed before it pushed anything;
- blocked: the disk was full when the first unit was written;
- completed.

The leases were for a minute, from the day on which the database was made.
"""

import asyncio
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from schemas.job import JobState
from schemas.names import attempt_dir, job_id_from_key, shard_file
from service.store import Store, jobs, publishing, units
from tests.support.jobs import Shop, request
from tests.support.pg import running_postgres
from tests.support.roles import Capture, run_planning

LEASE_S = 60.0
SAMPLES: list[dict[str, Any]] = [
    {"id": "a", "messages": [{"role": "user", "content": "Hm?"}, {"role": "assistant", "content": "Yes."}]},
    {"id": "b", "text": "a text"},
    {"id": "empty", "text": ""},
    {"id": "c", "token_ids": [70, 71, 72, 73, 74]},
    {"id": "d", "token_ids": [80, 81, 82], "loss_mask": [0, 1, 1]},
    {"id": "e", "token_ids": [90, 91]},
]
"""Three units: two, two and one sample; one sample is rejected."""


class Killed(BaseException):
    """Ends a role as a kill does: it gives nothing back."""


def fill(shop: Shop) -> None:
    """Bring one job to each place."""
    store = shop.store
    submit(shop, "completed")
    shop.plan()
    shop.capture(job_id_from_key("completed"))
    shop.publish()
    assert store.read(jobs.state, job_id_from_key("completed")) is JobState.COMPLETED

    blocked = submit(shop, "blocked")
    shop.plan()
    folder = shop.settings.work_root / attempt_dir(blocked, 0, 1)
    folder.mkdir(parents=True)
    full = folder / f".{shard_file(0)}.tmp"
    full.symlink_to("/dev/full")
    shop.capture(blocked)
    full.unlink(missing_ok=True)
    assert store.read(jobs.state, blocked) is JobState.BLOCKED

    leased = submit(shop, "leased")
    shop.plan()
    lease_unit(store, "a worker that was killed", 0.0)
    half = lease_unit(store, "a worker that was killed while it wrote", LEASE_S)
    folder = shop.settings.work_root / attempt_dir(leased, half.key.unit, half.key.epoch)
    folder.mkdir(parents=True)
    (folder / f".{shard_file(half.key.unit)}.tmp").write_bytes(b"PAR1 half a shard")
    lease_unit(store, "a worker that was killed before it wrote", LEASE_S)
    asyncio.run(asyncio.wait_for(_capture_one(shop, leased), 60))

    pushing = submit(shop, "publishing", hub={"repo_id": "org/states", "private": False})
    shop.plan()
    shop.capture(pushing)
    assert publishing.lease(store, "a publisher that was killed", LEASE_S) is not None
    assert store.read(jobs.state, pushing) is JobState.PUBLISHING

    submit(shop, "planned")
    shop.plan()

    planning = submit(shop, "planning")
    try:
        run_planning(
            store,
            shop.settings,
            "a planner that was killed",
            killed_once(lambda: store.read(units.of_job, planning)),
        )
    except Killed:
        assert len(store.read(units.of_job, planning)) == 1
    submit(shop, "queued")


def submit(shop: Shop, name: str, **changes: Any) -> str:
    """Submit a job of the samples, and return its id."""
    samples = [sample | {"id": f"{name} {sample['id']}"} for sample in SAMPLES]
    body = request(Path(), samples, model="./target", layers=[1, 2, 3], max_tokens=64, **changes)
    return shop.submit(body, name)


def lease_unit(store: Store, owner: str, seconds: float) -> Any:
    lease = units.lease(store, owner, seconds)
    assert lease is not None
    return lease


def killed_once(true: Callable[[], object]) -> Callable[[], bool]:
    """Return what a role asks whether it should stop: it is killed instead, once `true` is."""

    def stopped() -> bool:
        if true():
            raise Killed
        return False

    return stopped


async def _capture_one(shop: Shop, job_id: str) -> None:
    """Capture the one unit of a job that nobody holds."""
    loop = Capture(shop.store, shop.settings, "worker", only_job=job_id)
    task = asyncio.create_task(loop.run())
    while shop.store.read(jobs.job, job_id).progress.units_done < 1:
        await asyncio.sleep(0.01)
    loop.stop.set()
    await task


def dump_sqlite(path: Path, out: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        out.write_text("\n".join(connection.iterdump()) + "\n", encoding="utf-8")


def dump_postgresql(url: str, out: Path) -> None:
    """Dump without what only psql understands."""
    name, _, host = url.removeprefix("postgresql+psycopg://quarry@/").partition("?host=")
    command = ["pg_dump", "-h", host, "-U", "quarry", "--inserts", "--no-owner", "--no-privileges", name]
    dumped = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    lines = [line for line in dumped.splitlines() if line and not line.startswith(("--", "\\"))]
    out.write_text("\n".join(lines) + "\n", encoding="utf-8")


def make(out: Path, url: str) -> None:
    """Fill the empty database at `url`, and write the data folder to `out`."""
    data = {"data_dir": out / "data", "database_url": url, "unit_max_samples": 2, "hub_token": "hf_may_write"}
    shop = Shop.open(out, Path("target").absolute(), **data)
    try:
        fill(shop)
    finally:
        shop.store.close()


def main(out: Path, revision: str, kind: str) -> None:
    """Make the dump of one version for one kind of database, and the data folder."""
    out.mkdir(parents=True, exist_ok=True)
    if kind == "sqlite":
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch) / "quarry.db"
            make(out, f"sqlite:///{path}")
            dump_sqlite(path, out / f"{revision}-sqlite.sql")
    else:
        with running_postgres() as server, server.database() as url:
            make(out, url)
            dump_postgresql(url, out / f"{revision}-postgresql.sql")


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute(), sys.argv[2], sys.argv[3])
