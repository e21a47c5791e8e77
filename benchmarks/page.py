"""How soon the page answers with 1,000 jobs and 100,000 units, and what 50 open pages take of a core.

    python -m benchmarks.page

The service is a process of its own on SQLite. Times are from the request to the first byte of the
answer, over a connection that is open. While pages are open, half of them the list and half a job, each
follows the event stream and asks for itself again every eight seconds, the most that its script does. Eight
jobs commit two units a second each.
"""

import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
from sqlalchemy import insert

from schemas.dataset.entries import ShardEntry
from schemas.events import Event
from schemas.job import JobState, Progress
from schemas.names import shard_path
from service.store import NewJob, Store, TaskState, jobs, migration
from service.store.database import Transaction
from service.store.tables import EVENT, SHARD, TASK, UNIT, UNIT_COMMIT
from service.store.transitions import count, lock_job, record
from service.store.values import TaskKind
from tests.support.service_process import serving
from tests.support.store_cases import CHECKS, a_request, job_id, provenance

JOBS, UNITS, LARGE_UNITS, LIVE_JOBS = 1000, 100_000, 50_000, 8
CALLS, PAGES, OPEN_S, LEAST_S, COMMITS_S = 100, 50, 32.0, 8.0, 2.0


def fill(store: Store) -> list[str]:
    """Make the jobs with their units committed, the first one large; return their ids."""
    ids = [job_id(number) for number in range(JOBS)]
    each = (UNITS - LARGE_UNITS) // (JOBS - 1)
    for number, one in enumerate(ids):
        store.write(jobs.submit, NewJob.of(one, f"key {number}", a_request()))
    for number, one in enumerate(ids):
        with store.writing() as tx:
            add_units(tx, one, LARGE_UNITS if not number else each, number < LIVE_JOBS)
    return ids


def add_units(tx: Transaction, job: str, units: int, is_live: bool) -> None:
    """Give a job committed units with a shard and an event each."""
    now, made = tx.now, provenance()
    done = range(units)
    whose = [{"job_id": job, "unit": unit} for unit in done]
    rows = {"num_samples": 8, "num_tokens": 4096, "plan_sha256": "0" * 64}
    tx.connection.execute(insert(UNIT), [one | rows | {"place": one["unit"] + 1} for one in whose])
    task = {"kind": TaskKind.CAPTURE, "subject": "", "state": TaskState.DONE, "epoch": 1}
    task |= {"attempts": 1, "deaths": 0, "job_id": job}
    tx.connection.execute(insert(TASK), [task | {"item": unit, "subject": f"{job} {unit}"} for unit in done])
    committed: dict[str, Any] = {"epoch": 1, "host": 0, "provenance": made, "num_tokens": 4096}
    committed |= {"supervised_tokens": 2000, "checks": CHECKS, "num_bytes": 10**9, "committed_at": now}
    tx.connection.execute(insert(UNIT_COMMIT), [one | committed for one in whose])
    entry = {"sha256": "0" * 64, "xxh3": "0" * 32, "bytes": 10**9, "rows": 8, "tokens": 4096, "epoch": 1}
    shards = [
        one | {"path": path, "entry": shard_of(path, one["unit"], entry)}
        for one in whose
        if (path := shard_path(job, one["unit"]))
    ]
    tx.connection.execute(insert(SHARD), shards)
    locked = lock_job(tx, job)
    first = locked.last_event + 1
    progress = Progress(plan_done=True, units_planned=2 * units, units_done=units, samples_planned=16 * units)
    progress = count(
        progress, samples_written=8 * units, tokens_written=4096 * units, tokens_planned=8192 * units
    )
    message = Event(
        id=1, at=now, kind="unit", state=JobState.RUNNING, progress=progress, message="unit: done"
    )
    events = [message.model_copy(update={"id": first + unit}) for unit in done]
    tx.connection.execute(insert(EVENT), [{"job_id": job, "id": one.id, "entry": one} for one in events])
    state = JobState.RUNNING if is_live else JobState.COMPLETED
    record(
        tx,
        replace(locked, last_event=first + units - 1, state=state, progress=progress, provenance=made),
        "state",
        "filled",
    )


def shard_of(path: str, unit: int, entry: dict[str, Any]) -> ShardEntry:
    """Return a shard's entry."""
    return ShardEntry(path=path, unit=unit, layers=(), **entry)


def first_bytes_ms(url: str, path: str) -> list[float]:
    """Return how long each of many answers took to begin."""
    connection = HTTPConnection(urlsplit(url).netloc)
    times = []
    for _ in range(CALLS):
        began = time.perf_counter()
        connection.request("GET", path)
        answer = connection.getresponse()
        answer.read(1)
        times.append(1000 * (time.perf_counter() - began))
        answer.read()
        assert answer.status == 200, path
    return sorted(times)


def commit_units(store: Store, ids: Sequence[str], stop: threading.Event) -> None:
    """Let each job go on until it is over."""
    while not stop.wait(1 / COMMITS_S):
        for one in ids:
            with store.writing() as tx:
                locked = lock_job(tx, one)
                more = count(locked.progress, units_done=1, samples_written=8, tokens_written=4096)
                record(tx, replace(locked, progress=more), "unit", "one more")


def main() -> None:
    """Fill, ask, and look."""
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        data.mkdir()
        store = Store(f"sqlite:///{data / 'quarry.db'}")
        store.write(migration.migrate)
        ids = fill(store)
        with serving(data, "--no-worker") as service:
            for name, path in {
                "jobs": "/",
                "a job of 50,000 units": f"/ui/jobs/{ids[0]}",
                "a job of 50 units": f"/ui/jobs/{ids[500]}",
                "files in the middle": f"/ui/jobs/{ids[0]}/files?after=25000",
                "workers": "/ui/workers",
            }.items():
                times = first_bytes_ms(service.url, path)
                median, late = statistics.median(times), times[-2]
                print(f"{name}: first byte {median:.1f} ms (median), {late:.1f} ms (99 %)")
            process, stop = psutil.Process(service.process.pid), threading.Event()
            paths = ["/", f"/ui/jobs/{ids[0]}"] * (PAGES // 2)
            threads = [threading.Thread(target=look, args=(service.url, path, stop)) for path in paths]
            threads.append(threading.Thread(target=commit_units, args=(store, ids[:LIVE_JOBS], stop)))
            for thread in threads:
                thread.start()
                time.sleep(LEAST_S / len(threads))
            before = process.cpu_times()
            time.sleep(OPEN_S)
            after = process.cpu_times()
            used = after.user + after.system - before.user - before.system
            print(f"{PAGES} open pages: {100 * used / OPEN_S:.1f} % of a core")
            stop.set()
            for thread in threads:
                thread.join()
        store.close()


def look(url: str, path: str, stop: threading.Event) -> None:
    """Keep a page open."""
    stream = HTTPConnection(urlsplit(url).netloc)
    stream.request("GET", "/ui/events")
    told = stream.getresponse()
    while not stop.wait(LEAST_S):
        page = HTTPConnection(urlsplit(url).netloc)  # the service closes one that is silent for five seconds
        page.request("GET", path)
        page.getresponse().read()
        page.close()
    told.close()


if __name__ == "__main__":
    main()
