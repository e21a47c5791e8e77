"""The processes of a service, killed at random points of a job, and started again as systemd would."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar

import httpx2
from pydantic import SecretStr

from schemas.job import JobState
from service.errors import NotFound, StoreUnavailable
from service.host import HOST_FILE
from service.settings import Settings
from service.store import Store, Transaction, hosts, jobs
from tests.crash.conftest import MODE, SEED
from tests.crash.oracle import KEY
from tests.support.children import children_of, settings_environment
from tests.support.ports import free_port

PATIENCE_S = 5400.0 if MODE == "all" else 600.0
QUIET_S = 30.0
"""How long a kill waits for the job to take a step since the last one, but for the first step."""


CHILDREN = {
    "planner": "spawn_main",
    "reference": "service.proof.reference_process",
    "engine core": "VLLM::EngineCore",
}
"""A worker's children, by what their command lines hold; of those that multiprocessing spawned, the first."""


class Service:
    """A `quarry serve` on a port of its own, started again when it has ended."""

    command: ClassVar[tuple[str, ...]] = ("serve",)

    def __init__(self, settings: Settings, log: Path) -> None:
        self._settings = settings.model_copy(update={"port": free_port()})
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"http://127.0.0.1:{self._settings.port}"

    def start_if_dead(self) -> None:
        if self._process is None or self._process.poll() is not None:
            environment = settings_environment(self._settings, os.environ) | {"QUARRY_FAKE_STEP_S": "0.02"}
            command = [sys.executable, "-m", "service.cli", *self.command]
            with self._log.open("ab") as output:
                self._process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)

    def post(self, body: dict[str, Any]) -> str | None:
        """Send the job, under one key however often; return its id if it was accepted."""
        try:
            headers = {"Idempotency-Key": KEY}
            answer = httpx2.post(
                f"{self.url}/extract", json=body, headers=headers, trust_env=False, timeout=30
            )
        except httpx2.TransportError:
            return None
        assert answer.status_code in (200, 202, 503), answer.text
        return None if answer.status_code == 503 else str(answer.json()["id"])

    def processes(self) -> dict[str, int]:
        """Return what lives of the service, by what it is."""
        assert self._process is not None
        found = {"server": self._process.pid} if self._process.poll() is None else {}
        for worker in below(found.get("server"), "service.cli worker"):
            found["worker"] = worker
            for what, command in CHILDREN.items():
                for pid in below(worker, command)[:1]:
                    found[what] = pid
        return found

    def kill(self) -> None:
        """Kill the server; its worker ends with it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


class Machine(Service):
    """A worker that captures and stores on scratch of its own."""

    command = ("worker", "--roles", "capture,store")

    def __init__(self, settings: Settings, folder: Path) -> None:
        there = {"data_dir": folder / "scratch", "database_url": SecretStr(settings.database())}
        super().__init__(settings.model_copy(update=there), folder / "log-machine")

    def lose(self, store: Store) -> None:
        """Kill it, let all that it has be gone, and give it up."""
        self.kill()
        file = self._settings.data_dir / HOST_FILE
        if file.exists():
            with suppress(NotFound):  # killed before it was known
                store.write(hosts.forget, file.read_text())
            shutil.rmtree(file.parent)


def below(parent: int | None, command: str) -> list[int]:
    """Return the children of a process whose command line holds `command`."""
    try:
        return [
            pid
            for pid in sorted(children_of(parent) if parent is not None else [])
            if command in Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        ]
    except OSError:  # one of them has ended
        return []


@contextmanager
def services(settings: Settings, count: int) -> Iterator[list[Service]]:
    """Yield services on one folder and one database; what they started is gone in the end."""
    made = [Service(settings, settings.data_dir.with_name(f"log{number}")) for number in range(count)]
    try:
        yield made
    finally:
        for one in made:
            one.kill()


def num_events(tx: Transaction, job_id: str) -> int:
    return len(jobs.events(tx, job_id, limit=10_000))


def disturb(
    made: list[Service],
    store: Store,
    body: dict[str, Any],
    disturbances: dict[str, Callable[[], None]],
    kills: int,
    first: str | None,
    tally: Counter[str],
    steps: Callable[[Transaction, str], int] = num_events,
    apart: int = 1,
    machine: Machine | None = None,
) -> str:
    """Kill one process after another, one every `apart` steps of the job, until it ends; return its id.

    The `first` kill is of that process, which may live for some seconds of the job only.
    """
    draw = random.Random(f"{SEED}:processes {len(made)}")
    all_of = [*made, machine] if machine is not None else made
    if machine is not None:
        disturbances = disturbances | {"machine": machine.kill, "host": lambda: machine.lose(store)}
    job_id: str | None = None
    done = 0
    stepped = time.monotonic()
    deadline = stepped + PATIENCE_S
    while time.monotonic() < deadline:
        for one in all_of:
            one.start_if_dead()
        job_id = job_id or draw.choice(made).post(body)
        if job_id is None:
            continue
        try:
            now = store.read(steps, job_id)
            state = store.read(jobs.state, job_id)
        except StoreUnavailable:
            continue
        if state in {JobState.COMPLETED, JobState.FAILED, JobState.BLOCKED}:
            return job_id
        stands = now > 0 and time.monotonic() - stepped > QUIET_S
        processes = draw.choice(made).processes()
        awaited = first is not None and not tally[f"{first} kills"] and first not in processes
        if kills and (now >= done + apart or stands) and not awaited:
            done, stepped = now, time.monotonic()
            living = sorted({**processes, **disturbances})
            # What lives for a moment only is killed when it is there.
            what = min(living, key=lambda one: (tally[f"{one} kills"], draw.random()))
            if what in disturbances:
                disturbances[what]()
            else:
                with suppress(ProcessLookupError):  # it has ended by itself
                    os.kill(processes[what], signal.SIGKILL)
            kills -= 1
            tally[f"{what} kills"] += 1
            time.sleep(draw.random())
        time.sleep(0.1)
    raise AssertionError("the job did not end")
