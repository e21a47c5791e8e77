"""A service under load: submits, a long queue, listeners and slow callers at once, over real sockets.

The short form runs in `make test-all`; `make load` is the long one, whose figures docs/reliability.md has.
"""

import asyncio
import json
import os
import subprocess
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from statistics import quantiles
from typing import Any

import httpx2
import psutil
import pytest

from schemas.events import Event
from schemas.job import RESTING_JOB_STATES
from tests.support.pg import Postgres
from tests.support.service_process import QUARRY, ROOT, body_of, serving
from tests.support.tiny_model import random_target

PASSING = frozenset({503, 507})
HALF = (b"POST /extract HTTP/1.1\r\nHost: localhost\r\n", b"POST /extract HTTP/1.1\r\nHost: localhost\r\n"
        b"Content-Type: application/json\r\nContent-Length: 1000\r\n\r\n{")  # fmt: skip


@dataclass(frozen=True)
class Load:
    """How much, and for how long."""

    seconds: float
    jobs: int
    submits_at_once: int
    workers: int
    worker_niceness: int
    listeners: int
    slow: int


LOADS = {
    "short": Load(
        seconds=20, jobs=60, submits_at_once=30, workers=1, worker_niceness=0, listeners=60, slow=20
    ),
    # Eight workers stand for other machines: everything else comes first.
    "long": Load(
        seconds=600, jobs=1000, submits_at_once=200, workers=8, worker_niceness=19, listeners=400, slow=100
    ),
}


@dataclass
class Seen:
    """What came back."""

    statuses: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    latency_s: dict[str, list[float]] = field(default_factory=dict)
    rss_mib: list[float] = field(default_factory=list)
    descriptors: list[int] = field(default_factory=list)
    events: int = 0
    closed: int = 0
    completed: asyncio.Event = field(default_factory=asyncio.Event)

    def answer(self, what: str, response: httpx2.Response, began: float) -> None:
        """Count an answer; a server's error is a fault, unless it says when to come again."""
        self.statuses[f"{what} {response.status_code}"] += 1
        self.latency_s.setdefault(what, []).append(time.monotonic() - began)
        if response.status_code >= 500 and not (
            response.status_code in PASSING and "retry-after" in response.headers
        ):
            self.faults.append(f"{what}: {response.status_code} {response.text[:200]}")

    def figures(self) -> dict[str, Any]:
        """Return what there is to tell."""
        told: dict[str, Any] = {"statuses": dict(sorted(self.statuses.items()))}
        for what, seconds in sorted(self.latency_s.items()):
            cuts = quantiles(seconds, n=100)
            told[what] = {"p50_ms": round(cuts[49] * 1e3, 1), "p99_ms": round(cuts[98] * 1e3, 1)}
        third = max(1, len(self.rss_mib) // 3)
        told["rss_mib"] = [round(max(self.rss_mib[:third])), round(max(self.rss_mib[-third:]))]
        told["descriptors"] = [max(self.descriptors[:third]), max(self.descriptors[-third:])]
        return told | {"events": self.events, "slow_closed": self.closed}


@contextmanager
def workers(load: Load, environment: dict[str, str], data_dir: Path, log: Path) -> Iterator[None]:
    """Run the load's workers on the fake engine."""
    nice = ["nice", "-n", str(load.worker_niceness)]
    with ExitStack() as stack, log.open("w") as file:
        for _ in range(load.workers):
            command = [*nice, *QUARRY, "worker", "--data-dir", str(data_dir)]
            started = subprocess.Popen(command, env=os.environ | environment, stdout=file, stderr=file)
            stack.callback(started.wait)
            stack.callback(started.kill)
        yield


class Queue:
    """Submits jobs, so many at once, and knows those that nobody has listened to, in their order."""

    def __init__(self, client: httpx2.AsyncClient, at_once: int, body: dict[str, Any], seen: Seen) -> None:
        self._client, self._body, self._seen = client, body, seen
        self._places, self._numbers = asyncio.Semaphore(at_once), count()
        self.left: deque[str] = deque()

    async def submit(self) -> None:
        """Submit a job until it is taken."""
        headers = {"Idempotency-Key": f"load-{next(self._numbers)}"}
        while True:
            async with self._places:
                began = time.monotonic()
                response = await self._client.post("/extract", json=self._body, headers=headers)
                self._seen.answer("POST /extract", response, began)
            if response.status_code == 202:
                self.left.append(response.json()["id"])
                return
            await asyncio.sleep(float(response.headers["retry-after"]) / 10)


async def listen(client: httpx2.AsyncClient, queue: Queue, seen: Seen) -> None:
    """Follow a job to its end, submit another, and follow the next."""
    while True:
        job_id, state = queue.left.popleft(), None
        while state not in RESTING_JOB_STATES:
            async with client.stream("GET", f"/jobs/{job_id}/events") as response:
                seen.statuses[f"GET events {response.status_code}"] += 1
                async for line in response.aiter_lines():
                    if line.startswith("data:"):
                        seen.events += 1
                        state = Event.model_validate_json(line.removeprefix("data:")).state
        if state == "completed":
            seen.completed.set()
        await queue.submit()


async def stall(port: int, number: int, seen: Seen) -> None:
    """Send half a request, wait until the service closes, and begin again."""
    while True:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(HALF[number % 2])
            with suppress(ConnectionError):
                await reader.read()
            seen.closed += 1
        finally:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()


async def probe(client: httpx2.AsyncClient, path: str, seen: Seen) -> None:
    """Ask again and again."""
    while True:
        began = time.monotonic()
        response = await client.get(path)
        seen.answer(f"GET {path}", response, began)
        # All callers here are one owner, whose requests in work have a bound; probes have none.
        is_refused = path == "/jobs" and response.status_code == 429 and "retry-after" in response.headers
        if response.status_code != 200 and not is_refused:
            seen.faults.append(f"{path}: {response.status_code}")
        await asyncio.sleep(0.5)


async def watch(pid: int, seen: Seen) -> None:
    """Measure the API's process."""
    process = psutil.Process(pid)
    while True:
        seen.rss_mib.append(process.memory_info().rss / 2**20)
        seen.descriptors.append(process.num_fds())
        await asyncio.sleep(1)


async def play(url: str, pid: int, load: Load, body: dict[str, Any], seen: Seen) -> None:
    """Do all of it at once, for the load's time and until a job is complete."""
    # A connection that is kept may be closed by the service in the moment in which it is used again.
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=0)
    async with (
        httpx2.AsyncClient(base_url=url, timeout=120, trust_env=False, limits=limits) as client,
        httpx2.AsyncClient(base_url=url, timeout=None, trust_env=False, limits=limits) as streams,
    ):
        port = int(url.rpartition(":")[2])
        tasks = [asyncio.create_task(probe(client, path, seen)) for path in ("/readyz", "/healthz", "/jobs")]
        tasks += [asyncio.create_task(stall(port, number, seen)) for number in range(load.slow)]
        queue = Queue(client, load.submits_at_once, body, seen)
        await asyncio.gather(*(queue.submit() for _ in range(load.jobs)))
        tasks.append(asyncio.create_task(watch(pid, seen)))
        tasks += [asyncio.create_task(listen(streams, queue, seen)) for _ in range(load.listeners)]
        done, _ = await asyncio.wait(tasks, timeout=load.seconds, return_when=asyncio.FIRST_EXCEPTION)
        if not done:
            tasks.append(asyncio.create_task(seen.completed.wait()))
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for task in done:
            task.result()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("short", marks=pytest.mark.slow),
        pytest.param("long", marks=[pytest.mark.long, pytest.mark.timeout(1500)]),
    ],
)
def test_under_load_every_caller_is_answered(tmp_path: Path, postgres: Postgres, name: str) -> None:
    load, seen = LOADS[name], Seen()
    target = random_target(tmp_path / "model", layers=4, hidden=64)
    with postgres.database() as url:
        environment = {
            "QUARRY_DATABASE_URL": url,
            "QUARRY_MODEL_ROOTS": '["/"]',
            "QUARRY_ENGINE": "tests.support.fake_engine:FakeEngine",
            "QUARRY_EVENT_LISTENERS": "512",
            "PYTHONPATH": str(ROOT),
        }
        data_dir = tmp_path / "data"
        with (
            serving(data_dir, "--no-worker", **environment) as service,
            workers(load, environment, data_dir, tmp_path / "workers.log"),
        ):
            asyncio.run(play(service.url, service.process.pid, load, body_of(target), seen))
    figures = seen.figures()
    print(json.dumps(figures))
    assert seen.faults == []
    early, late = figures["rss_mib"]
    assert late < 1.2 * early + 50
    early, late = figures["descriptors"]
    assert late <= 1.1 * early + 10
