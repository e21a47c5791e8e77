"""Two machines without the data folder, each with a network and a root folder of its own: one is lost with
all that it has, the network of the other is cut for longer than its leases."""

import asyncio
import io
import json
import os
import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx2
import pyarrow.parquet as pq
import pytest
from sqlalchemy import func, select

from schemas.job import JobState
from schemas.worker import HostView
from service.host import HOST_FILE
from service.store import JobRow, Store, Transaction, commits, hosts, jobs
from service.store.tables import TASK
from tests.support.children import settings_environment
from tests.support.desk import REPO, TOKEN
from tests.support.fake_hub import FakeHub
from tests.support.hub_state import Token
from tests.support.jobs import ENDED, Shop
from tests.support.machines import AWAY
from tests.support.network import Machine, Network, missing
from tests.support.pg import running_postgres
from tests.support.real_engine import VLLM
from tests.support.roles import sweep
from tests.support.service_process import QUARRY, ROOT, serving
from tests.support.tiny_model import random_target
from tests.support.waiting import until

pytestmark = [
    pytest.mark.outside,
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
    pytest.mark.timeout(1800),
]

MODELS = "models"
LEASE_S = 5.0
HELD = 10
"""Units that each machine has captured, and not stored, when they are struck."""
PATIENCE_S = 600.0


@dataclass
class Site:
    """What two machines share: a database, a Hub, and models that they only read."""

    shop: Shop
    hub: FakeHub
    machines: tuple[Machine, Machine]
    root: Path
    home: str = ""
    """URL of the service at the data folder."""

    def log(self, machine: Machine) -> Path:
        return self.root / f"{machine.name}.log"

    def start(self, machine: Machine) -> None:
        """Start its worker, whose scratch is a folder of its own."""
        environment = settings_environment(self.shop.settings, os.environ) | {
            "QUARRY_DATA_DIR": str(self.root / "scratch"),
            "PYTHONPATH": str(ROOT),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HOME": str(self.root / "hub-cache"),
            "TMPDIR": str(self.root),
        }
        machine.start([*QUARRY, "worker", "--roles", "capture,store"], environment, self.log(machine))

    def id_of(self, machine: Machine) -> str:
        return (machine.own / "scratch" / HOST_FILE).read_text()

    def view(self, host_id: str) -> HostView | None:
        """Return what the service says of a host; none if it has no workers and holds nothing."""
        answer = httpx2.get(f"{self.home}/workers", trust_env=False)
        return next((view for one in answer.json()["hosts"] if (view := HostView(**one)).id == host_id), None)

    def job(self, job_id: str) -> JobRow:
        return self.shop.store.read(jobs.job, job_id)

    def wait(self, happened: Callable[[], object]) -> None:
        """Wait until something has happened; no machine that should run may have ended."""

        def looked() -> bool:
            for machine in self.machines:
                assert machine.is_running or not machine.own.exists(), self.log(machine).read_text()[-4000:]
            return bool(happened())

        asyncio.run(until(looked, patience_s=PATIENCE_S, poll_s=0.2))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Site]]:
    network = Network(tmp_path, MODELS)
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub-cache"))
    with (
        network.up(),
        running_postgres(network.address, network.range) as postgres,
        postgres.database() as local,
        FakeHub(address=network.address) as hub,
    ):
        hub.add_token(TOKEN, Token("me", orgs={"org": "write"}))
        url = local.partition("?")[0].replace("@/", f"@{network.address}/")
        opened: list[Store] = []

        def opening(**settings: object) -> Site:
            target = random_target(tmp_path / MODELS / "target", hidden=64, max_position=512)
            told = {"database_url": url, "hub_endpoint": hub.url, "hub_token": TOKEN, "lease_s": LEASE_S}
            roots = {"source_roots": (tmp_path / "incoming",), "units_in_flight": 1, "poll_s": 0.05}
            shop = Shop.open(tmp_path, target, **told, **roots, **settings)
            opened.append(shop.store)
            return Site(shop, hub, (network.machine("near"), network.machine("far")), tmp_path)

        yield opening
        for store in opened:
            store.close()


def longest_lease_s(tx: Transaction, job_id: str) -> float:
    """Return how long the job's leases still hold."""
    last = tx.connection.scalar(select(func.max(TASK.c.lease_until)).where(TASK.c.job_id == job_id))
    return 0.0 if last is None else float((last - tx.now).total_seconds())


def quarry(site: Site, *arguments: str) -> str:
    """Run a command at home and return what it prints."""
    environment = settings_environment(site.shop.settings, os.environ) | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([*QUARRY, *arguments], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def survives(site: Site, count: int, *, silent: bool, body: dict[str, object]) -> None:
    """1. Both machines hold captured units. 2. One is lost, the network of the other is cut. 3. The lost one
    is forgotten, or both are given up for their silence. 4. The network is back, and the other one ends the
    job alone: each sample is in the repository once."""
    samples = site.root / "incoming" / "samples.jsonl"
    samples.parent.mkdir()
    prompts = ([20 + n % 29, 5 + n // 29 % 37, 6 + n // 1073] for n in range(count))
    lines = (json.dumps({"id": str(n), "token_ids": prompt}) for n, prompt in enumerate(prompts))
    samples.write_text("\n".join(lines))
    home = settings_environment(site.shop.settings, {})
    home |= {"QUARRY_ROLES": '["plan", "store", "finish"]', "QUARRY_PORT": "0"}
    with serving(site.root / "data", **home) as service:
        site.home = service.url
        lost, left = site.machines
        for machine in site.machines:
            site.start(machine)
        body |= {"source": {"kind": "file", "path": str(samples)}, "hub": {"repo_id": REPO}, "loss": "all"}
        body |= {"model": str(site.root / MODELS / "target")}
        answer = httpx2.post(f"{service.url}/extract", json=body, trust_env=False, timeout=60)
        assert answer.status_code == 202, answer.text
        job_id = answer.json()["id"]

        def both_hold() -> bool:
            held = site.shop.store.read(hosts.views)
            progress = site.job(job_id).progress
            assert progress.units_done < max(progress.units_planned, 1), "too late"
            return sum(view.units_to_store >= HELD for view in held) == 2

        site.wait(both_hold)
        lost_id, left_id = map(site.id_of, site.machines)
        lost.lose()
        captured = site.job(job_id).progress.units_done
        site.wait(lambda: site.job(job_id).progress.units_done > captured)
        left.cut()
        site.wait(lambda: not (view := site.view(left_id)) or not view.workers)
        site.wait(lambda: site.shop.store.read(longest_lease_s, job_id) <= 0)
        if silent:
            site.wait(lambda: not any(map(site.view, (lost_id, left_id))))
        else:
            quarry(site, "workers", "forget", lost_id, "--server", service.url)
        given_up = site.job(job_id).progress
        assert not silent or given_up.units_done == given_up.units_stored
        assert given_up.units_done < given_up.units_planned
        left.restore()
        site.wait(lambda: site.shop.store.read(jobs.state, job_id) in ENDED)
        is_whole(site, job_id, count)
    # What the survivor left lying is swept at its next start, if not before.
    assert left.end(signal.SIGTERM) == 0, site.log(left).read_text()[-4000:]
    settings = site.shop.settings.model_copy(update={"data_dir": left.own / "scratch", "roles": AWAY})
    sweep(site.shop.store, settings)
    assert [path.name for path in settings.data_dir.rglob("*") if path.is_file()] == [HOST_FILE]


def is_whole(site: Site, job_id: str, count: int) -> None:
    """Each sample is in the repository once, and nothing else; `quarry verify` is content."""
    job = site.job(job_id)
    assert job.state is JobState.COMPLETED, job.problem
    progress = job.progress
    assert (progress.units_done, progress.units_stored) == (progress.units_planned, progress.units_planned)
    assert (progress.samples_written, progress.samples_rejected) == (count, 0)
    tree = site.hub.repo(REPO).head.tree
    made = site.shop.store.read(commits.unit_commits, job_id)
    named = {entry.path: entry.sha256 for unit in made for entry in unit.files}
    assert {path: blob.etag for path, blob in tree.items() if path.startswith(("data/", "index/"))} == named
    indexes = [site.hub.content(blob) for path, blob in tree.items() if path.startswith("index/")]
    ids = [row for index in indexes for row in pq.read_table(io.BytesIO(index))["source_id"].to_pylist()]
    assert Counter(ids) == Counter(map(str, range(count)))
    report = json.loads(quarry(site, "verify", REPO, "--json", "--model", str(site.root / MODELS / "target")))
    assert report["ok"] and (report["rows"], report["logit_rows"]) == (count, count), report


@pytest.mark.slow
@pytest.mark.parametrize(
    "silent",
    [pytest.param(False, id="forgotten"), pytest.param(True, marks=pytest.mark.long, id="silent")],
)
def test_one_machine_is_lost_and_the_other_cut_off_and_every_sample_is_stored_once(
    site: Callable[..., Site], monkeypatch: pytest.MonkeyPatch, silent: bool
) -> None:
    monkeypatch.setenv("QUARRY_FAKE_STEP_S", "0.2")
    place = site(unit_max_samples=3, host_lost_s=60.0 if silent else 1800.0)
    survives(place, 360, silent=silent, body={"layers": [1, 2], "canary": "skip"})


@pytest.mark.long
@pytest.mark.engine
def test_two_machines_on_vllm_store_2000_samples_once(site: Callable[..., Site]) -> None:
    """The same on the real engine, with every row proven by its logits and a canary of each machine."""
    options = {"enforce_eager": True, "max_num_batched_tokens": 256}
    place = site(engine=VLLM, engine_options=options, unit_max_samples=10)
    survives(place, 2000, silent=False, body={"layers": [1, 2], "canary": "run"})
