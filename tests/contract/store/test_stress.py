"""Fifteen threads do to one database what users and workers do, as fast as they can.

No verb raises what its contract does not name, and in the end every counter is the sum of the rows it counts.
`STRESS_SECONDS` is how long each database is played with.
"""

import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace

import pytest

from schemas.dataset.columns import CONTENT_HASH_BYTES
from schemas.job import JobState
from schemas.keys import NewKey, Scope
from schemas.request import ExtractRequest
from schemas.schedule import NewSchedule, ScheduleChange
from schemas.source import PostedSource
from service.control import scheduling
from service.errors import Conflict, LeaseLost, NotFound, Outcome, QuotaExceeded
from service.store import (
    NewJob,
    Store,
    commits,
    deletion,
    jobs,
    keys,
    migration,
    plans,
    publishing,
    schedules,
    tasks,
    units,
)
from tests.support.store_cases import (
    IDENTITY,
    PROBLEM,
    ROOMY,
    a_request,
    check_sums,
    job_id,
    made,
    planned,
    reject,
)

SECONDS = int(os.environ.get("STRESS_SECONDS", "20"))
FASTER = 60
"""Minutes pass in seconds, so that slots come and leases run out."""
CLOCKS = {
    "sqlite": f"strftime('%Y-%m-%d %H:%M:%f000', 2461200.5 + (julianday('now') - 2461200.5) * {FASTER})",
    "postgresql": f"(timestamptz '2026-06-10' + (clock_timestamp() - timestamptz '2026-06-10') * {FASTER})",
}
TTL_S = 60.0
LIMIT = 3
"""Jobs at once that one owner may have."""


@dataclass
class Crowd:
    """What all threads share. A verb may raise what its call here lists, and nothing else."""

    store: Store
    until_s: float
    made: list[str] = field(default_factory=list)
    calls: Counter[str] = field(default_factory=Counter)
    errors: list[BaseException] = field(default_factory=list)

    def run(self, act: "Act", number: int) -> None:
        """Act until the time is over, or any thread has met what no contract names."""
        chance = random.Random(number)
        try:
            while time.monotonic() < self.until_s and not self.errors:
                act(self, chance, f"thread-{number}")
                self.calls[act.__name__] += 1
        except BaseException as error:  # noqa: BLE001 - raised by the test
            self.errors.append(error)

    def some_job(self, chance: random.Random) -> str:
        return chance.choice(self.made[-12:]) if self.made else job_id(0)


Act = Callable[[Crowd, random.Random, str], None]


def submits(crowd: Crowd, chance: random.Random, name: str) -> None:
    """New keys, keys again, and an owner with a quota."""
    owner = chance.choice([None, "ann"])
    number = chance.randrange(10**6) if chance.random() < 0.8 else 0
    new = NewJob.of(jobs.new_id(), f"key {number}", a_request(), chance.randrange(3), owner=owner)
    with suppress(Conflict, QuotaExceeded):
        row, _ = crowd.store.write(jobs.submit, new)
        crowd.made.append(row.id)
    time.sleep(0.02)


def plans_jobs(crowd: Crowd, chance: random.Random, name: str) -> None:
    lease = plans.lease(crowd.store, name, TTL_S)
    if lease is None:
        time.sleep(0.05)
        return
    with suppress(LeaseLost):
        if chance.random() < 0.1:
            crowd.store.write(tasks.fail, lease, PROBLEM, chance.choice(list(Outcome)), 3)
            return
        crowd.store.write(plans.set_identity, lease, IDENTITY)
        for unit in range(1 + int(lease.job_id[-1], 16) % 4):
            crowd.store.write(plans.add_unit, lease, planned(unit, 3), (reject(100 + unit),))
        crowd.store.write(plans.finish, lease, (reject(200),))


def captures(crowd: Crowd, chance: random.Random, name: str) -> None:
    """Commit, mostly; else fail, give back, or vanish and commit when the lease may be another's."""
    lease = units.lease(crowd.store, name, TTL_S)
    if lease is None:
        time.sleep(0.05)
        return
    with suppress(LeaseLost):
        fate = chance.random()
        if fate < 0.05:
            crowd.store.write(tasks.fail, lease, PROBLEM, chance.choice(list(Outcome)), 3)
        elif fate < 0.15:
            crowd.store.write(tasks.release, lease)
        else:
            if fate < 0.2:
                time.sleep(1.2 * TTL_S / FASTER)
            elif fate < 0.4:
                crowd.store.write(tasks.extend, [lease], TTL_S)
            commit = made(lease, (reject(lease.attempt_id.unit),))
            crowd.store.write(
                commits.commit, replace(commit, content_hashes=bytes(2 * CONTENT_HASH_BYTES)), lease
            )


def publishes(crowd: Crowd, chance: random.Random, name: str) -> None:
    lease = publishing.lease(crowd.store, name, TTL_S)
    if lease is None:
        time.sleep(0.05)
        return
    with suppress(LeaseLost):
        if chance.random() < 0.1:
            crowd.store.write(tasks.fail, lease, PROBLEM, Outcome.RETRY, 100)
        else:
            crowd.store.write(publishing.complete, lease, None)


def changes_jobs(crowd: Crowd, chance: random.Random, name: str) -> None:
    job = crowd.some_job(chance)
    with suppress(Conflict, NotFound, QuotaExceeded):
        if chance.random() < 0.2:
            crowd.store.write(jobs.set_priority, job, chance.randrange(-5, 6))
        else:
            crowd.store.write(chance.choice([jobs.cancel, jobs.pause, jobs.resume, jobs.resume]), job)
    time.sleep(0.05)


def deletes(crowd: Crowd, chance: random.Random, name: str) -> None:
    job = crowd.some_job(chance)
    with suppress(Conflict, NotFound):
        crowd.store.write(deletion.begin, job, with_dataset=False)
        crowd.store.write(deletion.forget, job)
    time.sleep(0.05)


def ends_deletions(crowd: Crowd, chance: random.Random, name: str) -> None:
    lease = deletion.lease(crowd.store, name, TTL_S)
    if lease is not None:
        crowd.store.write(deletion.forget, lease.job_id)
    time.sleep(0.02)


def keeps_schedules(crowd: Crowd, chance: random.Random, name: str) -> None:
    """Add, change, remove, and run now: two names, two owners."""
    schedule, verb = chance.choice(["nightly", "daily"]), chance.random()
    with suppress(Conflict, NotFound):
        if verb < 0.4:
            request = ExtractRequest(model="org/model", source=PostedSource(kind="posted"))
            rules = {"cron": "* * * * *", "overlap": chance.choice(["queue", "replace", "skip"])}
            new = NewSchedule(name=schedule, request=request, **rules)
            crowd.store.write(schedules.add, new, chance.choice([None, "ann"]))
        elif verb < 0.6:
            scheduling.change(crowd.store, ROOMY, schedule, ScheduleChange(paused=chance.random() < 0.3))
        elif verb < 0.9:
            crowd.store.write(schedules.run_now, schedule)
        else:
            crowd.store.write(schedules.remove, schedule)
    time.sleep(0.1)


def looks_at_slots(crowd: Crowd, chance: random.Random, name: str) -> None:
    """As every worker does; what it raises would end a worker, so it may raise nothing."""
    scheduling.submit_due(crowd.store, ROOMY)
    for schedule in ("nightly", "daily"):
        with suppress(NotFound):
            runs = crowd.store.read(schedules.past, schedule, limit=20)
            crowd.made += [run.job_id for run in runs if run.job_id and run.job_id not in crowd.made]
    time.sleep(0.1)


ACTS: list[Act] = [
    *[submits] * 2, *[plans_jobs] * 2, *[captures] * 3, *[publishes] * 2, *[changes_jobs] * 1,
    deletes, ends_deletions, keeps_schedules, *[looks_at_slots] * 2,
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 300)
def test_many_threads_leave_counters_that_are_the_sums_of_their_rows(url: str) -> None:
    store = Store(url, CLOCKS[url.partition(":")[0].partition("+")[0]])
    try:
        play(store, url.partition(":")[0])
    finally:
        store.close()


def play(store: Store, name: str) -> None:
    """Let the threads act, then hold every job against its rows."""
    store.write(migration.migrate)
    grants = {"scopes": (Scope.JOBS_WRITE, Scope.SCHEDULES), "max_jobs": LIMIT}
    store.write(keys.add, "00000000", "0" * 64, NewKey(name="ann", **grants))
    crowd = Crowd(store, time.monotonic() + SECONDS)
    threads = [threading.Thread(target=crowd.run, args=(act, number)) for number, act in enumerate(ACTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if crowd.errors:
        raise crowd.errors[0]
    rows, cursor = [], None
    while rows == [] or cursor is not None:
        page, cursor = store.read(jobs.page, cursor=cursor, limit=200)
        rows += page
    for row in rows:
        check_sums(store, row.id)
    completed = sum(row.state is JobState.COMPLETED for row in rows)
    print(f"{name}: {dict(crowd.calls)}, {len(rows)} jobs at the end, {completed} completed")
    assert completed
