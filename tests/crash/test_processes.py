"""Every process of a service is killed at random points of a job: server, worker, planner, reference, engine.

`quarry serve` runs as it is deployed. What has ended is started again, as a person or systemd would, and
nothing else is done. One form runs two of everything on one PostgreSQL, which crashes under way too.
"""

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2
import pytest

from schemas.job import JobState
from service.errors import StoreUnavailable
from service.proof.verify import verify_dataset
from service.settings import Settings
from service.store import Store, jobs, migration
from tests.crash.conftest import MODE, SEED
from tests.crash.oracle import KEY, assert_right, make_target, service
from tests.support.children import children_of, settings_environment
from tests.support.desk import REPO, TOKEN, etags, writable_hub
from tests.support.jobs import conversations, request
from tests.support.pg import running_postgres

PATIENCE_S = 600.0
QUIET_S = 10.0
"""How long a kill waits for the job to take a step since the last one."""


CHILDREN = {
    "planner": "spawn_main",
    "reference": "service.proof.reference_process",
    "engine core": "VLLM::EngineCore",
}
"""A worker's children, by what their command lines hold; of those that multiprocessing spawned, the first."""


class Service:
    """A `quarry serve` on a port of its own, started again when it has ended."""

    def __init__(self, settings: Settings, log: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._settings = settings.model_copy(update={"port": free.getsockname()[1]})
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    def start_if_dead(self) -> None:
        if self._process is None or self._process.poll() is not None:
            environment = settings_environment(self._settings, os.environ) | {"QUARRY_FAKE_STEP_S": "0.02"}
            command = [sys.executable, "-m", "service.cli", "serve"]
            with self._log.open("ab") as output:
                self._process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)

    def post(self, body: dict[str, Any]) -> str | None:
        """Send the job, under one key however often; return its id if it was accepted."""
        url = f"http://127.0.0.1:{self._settings.port}/extract"
        try:
            headers = {"Idempotency-Key": KEY}
            answer = httpx2.post(url, json=body, headers=headers, trust_env=False, timeout=30)
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


def disturb(
    made: list[Service],
    store: Store,
    body: dict[str, Any],
    disturbances: dict[str, Callable[[], None]],
    kills: int,
    first: str | None,
    tally: Counter[str],
) -> str:
    """Kill one process after another, each after a step of the job, until it ends; return its id.

    The `first` kill is of that process, which may live for some seconds of the job only.
    """
    draw = random.Random(f"{SEED}:processes {len(made)}")
    job_id: str | None = None
    events = 0
    stepped = time.monotonic()
    deadline = stepped + PATIENCE_S
    while time.monotonic() < deadline:
        for one in made:
            one.start_if_dead()
        job_id = job_id or draw.choice(made).post(body)
        if job_id is None:
            continue
        try:
            now = len(store.read(jobs.events, job_id, limit=10_000))
            state = store.read(jobs.state, job_id)
        except StoreUnavailable:
            continue
        if state in {JobState.COMPLETED, JobState.FAILED, JobState.BLOCKED}:
            return job_id
        stands = time.monotonic() - stepped > QUIET_S
        processes = draw.choice(made).processes()
        awaited = first is not None and not tally[f"{first} kills"] and first not in processes
        if kills and (now > events or stands) and not awaited:
            events, stepped = now, time.monotonic()
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


def eventually(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.1)


FORMS: dict[str, dict[str, Any]] = {
    "one-on-sqlite": {"services": 1, "engine": "tests.support.fake_engine:FakeEngine", "canary": "skip"},
    "two-on-postgresql": {"services": 2, "engine": "tests.support.fake_engine:FakeEngine", "canary": "skip"},
    "one-that-pushes": {
        "services": 1,
        "engine": "tests.support.eager_engine:EagerEngine",
        "canary": "skip",
        "hub": {"repo_id": REPO},
    },
    "one-whose-shards-leave": {
        "services": 1,
        "engine": "tests.support.eager_engine:EagerEngine",
        "canary": "skip",
        "hub": {"repo_id": REPO},
        "storage": {"keep_local": False},
    },
    "one-with-a-model": {
        "services": 1,
        "engine": "tests.support.model_engine:ModelEngine",
        "canary": "run",
        "first": "reference",
    },
    "one-on-vllm": {
        "services": 1,
        "engine": "service.capture.vllm_engine:VllmEngine",
        "canary": "run",
        "first": "engine core",
    },
}


@pytest.mark.crash
@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("form", FORMS if MODE == "all" else list(FORMS)[:5])
def test_kills_of_every_process_lose_and_double_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tally: Counter[str], form: str
) -> None:
    chosen, target = FORMS[form], make_target(tmp_path)
    num_samples = 100
    with ExitStack() as stack:
        disturbances: dict[str, Callable[[], None]] = {}
        changes: dict[str, Any] = {"engine": chosen["engine"], "unit_attempts": 100}
        if chosen["services"] == 2:
            postgres = stack.enter_context(running_postgres())
            changes["database_url"] = stack.enter_context(postgres.database())
            disturbances["PostgreSQL"] = postgres.crash
        if "hub" in chosen:
            hub = stack.enter_context(writable_hub(tmp_path, monkeypatch))
            changes |= {"hub_endpoint": hub.url, "hub_token": TOKEN}
            if "storage" in chosen:
                monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")  # the Hub then has the files' own bytes
        settings = service(tmp_path / "data", target, **changes)
        samples = conversations(num_samples, longest=20)
        more = {name: chosen[name] for name in ("canary", "hub") if name in chosen}
        storage = {"shard_bytes": 98_304} | chosen.get("storage", {})
        body = request(target, samples, layers=(1, 2), storage=storage, **more)
        settings.data_dir.mkdir()
        store = Store(settings.database())
        store.write(migration.migrate)
        stack.callback(store.close)
        made = stack.enter_context(services(settings, chosen["services"]))
        kills = 30 if MODE == "all" else 6
        job_id = disturb(
            made, store, body.model_dump(mode="json"), disturbances, kills, chosen.get("first"), tally
        )
        job = store.read(jobs.job, job_id)
        assert job.state is JobState.COMPLETED, job.problem
        dataset = settings.dataset_dir(job_id)
        if "hub" in chosen:
            titles = Counter(commit.title for commit in hub.repo(REPO).commits)
            tally["commits while others were captured"] += titles[f"Add units of {job_id}"]
            there = {path: blob.etag for path, blob in hub.repo(REPO).head.tree.items()}
            del there[".gitattributes"]
            if "storage" in chosen:
                eventually(lambda: not list(dataset.glob("data/*/*")))
                for path, blob in hub.repo(REPO).head.tree.items():
                    if path.startswith("data/"):
                        (dataset / path).write_bytes(hub.content(blob))
            assert etags(dataset).items() >= there.items()
    if chosen["canary"] == "skip":
        assert_right(dataset, target, num_samples)
    else:
        report = verify_dataset(dataset, model_folder=target)
        assert report.ok and report.rows == num_samples, report.findings
