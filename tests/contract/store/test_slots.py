"""Hundreds of slots, three services that look for them, and kills: each slot becomes one job."""

import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from sqlalchemy import select

from schemas.job import JobState
from schemas.schedule import NewSchedule, RunOutcome
from service.store import Store, jobs, schedules
from service.store.tables import JOB
from tests.support.store_cases import CLOCK, Clock

ROOT = Path(__file__).parents[3]
START = datetime.fromtimestamp(1_800_000_000, UTC)
NAMES = {f"schedule-{number}": f"*/{number} * * * *" for number in (2, 3, 4, 5, 6, 7, 10, 15, 20, 30)}
HOURS = 3
SERVICES, KILL_EVERY = 3, 30
"""Simulated minutes between two kills."""

SERVICE = f"""
import sys, time
from service.control.scheduling import submit_due
from service.settings import Settings
from service.store import Store

settings = Settings(data_dir="/", min_free_bytes=0)
store = Store(sys.argv[1], {CLOCK!r})
while True:
    if not submit_due(store, settings):
        time.sleep(0.002)
"""


@contextmanager
def services(url: str) -> Iterator[list[subprocess.Popen[bytes]]]:
    running = [start(url) for _ in range(SERVICES)]
    try:
        yield running
    finally:
        for service in running:
            service.kill()
            service.wait()


def start(url: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", SERVICE, url], cwd=ROOT)


@pytest.mark.slow
@pytest.mark.crash
def test_each_of_hundreds_of_slots_becomes_one_job_whoever_is_killed(
    store: Store, url: str, clock: Clock
) -> None:
    """Time goes on by a minute when every slot before it was decided on; now and then a service is killed."""
    for name, cron in NAMES.items():
        body = {"name": name, "cron": cron, "missed": "all", "overlap": "replace"}
        request = {"model": "org/model", "source": {"kind": "file", "path": "rows.jsonl"}}
        store.write(schedules.add, NewSchedule.model_validate({**body, "request": request}))
    rules = {name: store.read(schedules.schedule_view, name) for name in NAMES}
    end = START + timedelta(hours=HOURS)
    expected = {
        name: [slot for slot in view.first_slots(START, 400) if slot <= end] for name, view in rules.items()
    }
    assert sum(map(len, expected.values())) > 300
    chance = random.Random(7)
    with services(url) as running:
        for minute in range(60 * HOURS):
            clock.advance(60)
            if minute % KILL_EVERY == 0:
                victim = chance.randrange(SERVICES)
                time.sleep(chance.random() / 100)
                running[victim].kill()
                running[victim].wait()
                running[victim] = start(url)
            while store.read(schedules.due):
                time.sleep(0.001)
    for name, slots in expected.items():
        runs = store.read(schedules.past, name, limit=1000)
        assert [run.slot for run in reversed(runs)] == slots
        assert {run.outcome for run in runs} == {RunOutcome.SUBMITTED}
        assert len({run.job_id for run in runs}) == len(slots)
    with store.reading() as tx:
        states = Counter(tx.connection.scalars(select(JOB.c.state)))
    total = sum(map(len, expected.values()))
    assert states == {JobState.QUEUED: len(NAMES), JobState.CANCELLED: total - len(NAMES)}
    assert sum(store.read(jobs.counts).values()) == total
