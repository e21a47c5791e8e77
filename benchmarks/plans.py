"""A plan of a billion tokens in each database: `python -m benchmarks.plans [TOKENS] [sqlite|postgresql]...`.

Prints a JSON object for each database. The plan is made as the planner makes it, from random tokens of a
text's frequencies; then 64 workers, threads of eight processes, lease units and commit them; then a backup is
made, the job is deleted, and a second one is planned into what the first one gave back.
"""

import json
import multiprocessing
import os
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from statistics import median, quantiles

import numpy as np
from sqlalchemy import make_url, text

from service.plan.unit_plan import packed
from service.plan.units import PlannedSample
from service.store import PlannedUnit, Store, commits, deletion, jobs, migration, plans
from tests.support.pg import running_postgres
from tests.support.store_cases import job_id, lease_unit, made, start_plan

UNIT_TOKENS, SAMPLE_TOKENS, VOCABULARY = 65_536, 1024, 151_936
PROCESSES, THREADS, UNITS_EACH = 8, 8, 12
SAMPLES = UNIT_TOKENS // SAMPLE_TOKENS
DRAW = np.random.default_rng(0)


def unit_samples() -> list[PlannedSample]:
    """Return a unit's samples: token ids by Zipf's law, the second half of each supervised."""
    weights = 1 / (np.arange(VOCABULARY) + 2.7)
    ids = DRAW.choice(VOCABULARY, UNIT_TOKENS, p=weights / weights.sum()).astype(np.int32)
    mask = (np.arange(SAMPLE_TOKENS) >= SAMPLE_TOKENS // 2).astype(np.uint8)
    return [
        PlannedSample(row, DRAW.bytes(16).hex(), f"train.jsonl:{row}", one, mask)
        for row, one in enumerate(np.split(ids, SAMPLES))
    ]


def plan(store: Store, num_units: int, number: int) -> dict[str, float]:
    """Plan a job; return how it went. Few units are drawn, and each is packed anew."""
    drawn = [unit_samples() for _ in range(8)]
    lease, took, num_bytes = start_plan(store, number), [], 0
    begin = time.monotonic()
    for unit in range(num_units):
        planned = PlannedUnit(unit, SAMPLES, UNIT_TOKENS, packed(drawn[unit % len(drawn)]))
        added = time.monotonic()
        store.write(plans.add_unit, lease, planned, ())
        took.append(time.monotonic() - added)
        num_bytes += len(planned.plan)
    all_s = time.monotonic() - begin
    store.write(plans.finish, lease, ())
    return {
        "tokens_s": round(num_units * UNIT_TOKENS / all_s),
        "unit_kB": round(num_bytes / num_units / 1e3),
        "add_p50_ms": round(median(took) * 1e3, 1),
        "add_p99_ms": round(quantiles(took, n=100)[98] * 1e3, 1),
    }


Span = tuple[float, float]
"""When something began and ended, in seconds of the host's clock."""


def work(url: str, number: int) -> list[Span]:
    """Lease and commit units in several threads; return when each unit was leased and committed."""
    with closing(Store(url)) as store:
        one = partial(one_worker, store, number)
        with ThreadPoolExecutor(THREADS) as pool:
            return [span for spans in pool.map(one, range(THREADS)) for span in spans]


def one_worker(store: Store, process: int, thread: int) -> list[Span]:
    """Capture units in no time."""
    spans = []
    for _ in range(UNITS_EACH):
        begin = time.monotonic()
        lease = lease_unit(store, f"worker-{process}-{thread}")
        store.write(commits.commit, made(lease), lease)
        spans.append((begin, time.monotonic()))
    return spans


def workers(url: str) -> dict[str, float]:
    """Let all workers run at once."""
    with multiprocessing.get_context("spawn").Pool(PROCESSES) as pool:
        parts = pool.starmap(work, [(url, number) for number in range(PROCESSES)], chunksize=1)
    spans = [span for part in parts for span in part]
    all_s = max(end for _, end in spans) - min(begin for begin, _ in spans)
    took = [end - begin for begin, end in spans]
    return {
        "workers": PROCESSES * THREADS,
        "units_s": round(len(spans) / all_s, 1),
        "unit_p50_ms": round(median(took) * 1e3),
        "unit_p99_ms": round(quantiles(took, n=100)[98] * 1e3),
    }


def delete(store: Store, name: str) -> dict[str, float]:
    """Delete a job as its task does, without the pauses between the steps."""
    store.write(jobs.cancel, name)
    store.write(deletion.begin, name, with_dataset=False)
    took, begin = [], time.monotonic()
    more = True
    while more:
        step = time.monotonic()
        more = store.write(deletion.forget, name)
        took.append(time.monotonic() - step)
    return {
        "delete_s": round(time.monotonic() - begin, 1),
        "longest_step_ms": round(max(took) * 1e3),
    }


def sqlite_backup(url: str, folder: Path) -> int:
    """Back the database up as `sqlite3 .backup` does; return the copy's bytes."""
    copy = folder / "copy.db"
    with (
        closing(sqlite3.connect(str(make_url(url).database))) as source,
        closing(sqlite3.connect(copy)) as into,
    ):
        source.backup(into)
    return copy.stat().st_size


def sqlite_bytes(store: Store, url: str) -> int:
    """Return the bytes of the database and of its write-ahead log."""
    path = str(make_url(url).database)
    return sum(os.stat(f"{path}{end}").st_size for end in ("", "-wal"))  # noqa: PTH116


def postgresql_backup(url: str, folder: Path) -> int:
    """Dump the database; return the dump's bytes."""
    dump = folder / "dump"
    command = ["pg_dump", "--format=custom", f"--file={dump}", url.replace("+psycopg", "")]
    subprocess.run(command, check=True)
    return dump.stat().st_size


def postgresql_bytes(store: Store, url: str) -> int:
    """Return the database's bytes, after what a vacuum gives back to it."""
    with store.reading() as tx:
        size: int = tx.connection.scalars(text("SELECT pg_database_size(current_database())")).one()
    return size


Sizes = Callable[[Store, str], int]
Backup = Callable[[str, Path], int]


def measure(url: str, folder: Path, num_units: int, sizes: Sizes, backup: Backup) -> dict[str, object]:
    """Return all figures of one database."""
    with closing(Store(url)) as store:
        store.write(migration.migrate)
        figures: dict[str, object] = {"units": num_units, **plan(store, num_units, 1)}
        figures |= {"MB": round(sizes(store, url) / 1e6), **workers(url)}
        begin = time.monotonic()
        figures["backup_MB"] = round(backup(url, folder) / 1e6)
        figures["backup_s"] = round(time.monotonic() - begin, 1)
        figures |= delete(store, job_id(1))
        figures["MB_deleted"] = round(sizes(store, url) / 1e6)
        again = plan(store, num_units // 4, 2)
        figures |= {"again_tokens_s": again["tokens_s"], "MB_again": round(sizes(store, url) / 1e6)}
    return figures


@contextmanager
def sqlite_url(folder: Path) -> Iterator[str]:
    """Lend a new file."""
    yield f"sqlite:///{folder}/quarry.db"


@contextmanager
def postgresql_url(folder: Path) -> Iterator[str]:
    """Lend an empty database of a server of its own."""
    with running_postgres() as server, server.database() as url:
        yield url


DATABASES = {
    "sqlite": (sqlite_url, sqlite_bytes, sqlite_backup),
    "postgresql": (postgresql_url, postgresql_bytes, postgresql_backup),
}


def main() -> None:
    """Measure the databases that are named, or both."""
    num_units = int(float(sys.argv[1] if sys.argv[1:] else "1e9")) // UNIT_TOKENS
    for name in sys.argv[2:] or DATABASES:
        opened, sizes, backup = DATABASES[name]
        with tempfile.TemporaryDirectory() as folder, opened(Path(folder)) as url:
            figures = measure(url, Path(folder), num_units, sizes, backup)
        print(json.dumps({"database": name, **figures, "load": round(os.getloadavg()[0], 1)}), flush=True)


if __name__ == "__main__":
    main()
