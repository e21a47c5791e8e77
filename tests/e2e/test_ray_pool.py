"""Workers on a Ray cluster of several nodes, all on this machine: placed, restarted, replaced and drained."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from ray.cluster_utils import Cluster

from schemas.job import JobState
from service import host
from service.ray_pool import WorkerActor, ray_pool
from service.settings import Settings
from service.store import jobs, units
from tests.support.children import settings_environment, wait_for_end
from tests.support.desk import REPO, TOKEN, writable_hub
from tests.support.fake_hub import FakeHub
from tests.support.jobs import ENDED, Shop, conversations, request
from tests.support.machines import is_whole
from tests.support.pg import Postgres
from tests.support.real_engine import vllm_shop
from tests.support.tiny_model import random_target
from tests.support.waiting import until

ROOT = Path(__file__).parents[2]


@dataclass
class Pool:
    """A cluster whose nodes have room for one worker each, and the command line of a pool on it."""

    shop: Shop
    cluster: Cluster

    def quarry_ray(self, verb: str, *options: object, codes: Sequence[int] = (0,)) -> str:
        """Run `quarry ray` to its end and return what it prints."""
        command = [sys.executable, "-m", "service.cli", "ray", verb, "--address", self.cluster.address]
        environment = settings_environment(self.shop.settings, os.environ)
        arguments = [*command, *map(str, options)]
        done = subprocess.run(arguments, env=environment, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode in codes, done.stderr
        return done.stdout

    def up(self, workers: int) -> None:
        """Let the pool have so many workers, each on a CPU of a node."""
        scratch = self.shop.settings.data_dir.parent / "scratch"
        self.quarry_ray("up", "--workers", workers, "--gpus-per-worker", 0, "--scratch", scratch)

    def reach(self, *states: str) -> None:
        """Wait until the pool's workers are in these states."""
        with ray_pool(self.shop.settings, self.cluster.address) as pool:

            def reached() -> bool:
                return sorted(worker.state for worker in pool.status()) == sorted(states)

            asyncio.run(until(reached, poll_s=0.2))

    def workers(self, node: Any = None) -> set[int]:
        """Return the process ids of `quarry worker` on a node, or on all."""
        raylets = {one.all_processes["raylet"][0].process.pid for one in self.cluster.list_all_nodes()}
        if node is not None:
            raylets = {node.all_processes["raylet"][0].process.pid}
        pids = set()
        for process in psutil.process_iter():
            try:
                is_worker = {"worker", "--parent-pid"} <= set(process.cmdline())
                if is_worker and int(process.environ()["RAY_RAYLET_PID"]) in raylets:
                    pids.add(process.pid)
            except (psutil.NoSuchProcess, psutil.ZombieProcess, KeyError):
                continue
        return pids


@contextmanager
def pool_of(shop: Shop, nodes: int) -> Iterator[Pool]:
    """Start a cluster whose head takes no workers, and whose nodes have the secrets."""
    host.host_of(shop.store, shop.settings)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    with pytest.MonkeyPatch.context() as of_nodes:
        of_nodes.setenv("QUARRY_DATABASE_URL", shop.settings.database())
        of_nodes.setenv("QUARRY_HUB_TOKEN", TOKEN)
        try:
            for _ in range(nodes):
                cluster.add_node(num_cpus=1)
            yield Pool(shop, cluster)
        finally:
            cluster.shutdown()


def store_holds(cluster: Cluster, words: bytes) -> bool:
    """Say whether the memory of the cluster's control store has these bytes."""
    pid = cluster.head_node.all_processes["gcs_server"][0].process.pid
    maps = [line.split() for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
        for begin, end in (fields[0].split("-") for fields in maps if fields[1].startswith("rw")):
            memory.seek(int(begin, 16))
            if words in memory.read(int(end, 16) - int(begin, 16)):
                return True
    return False


@pytest.fixture
def url(postgres: Postgres) -> Iterator[str]:
    with postgres.database() as url:
        yield url


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with writable_hub(tmp_path, monkeypatch) as hub:
        yield hub


@pytest.fixture
def models(tmp_path: Path) -> Path:
    return tmp_path / "models"


@pytest.mark.slow
def test_a_pool_loses_a_node_gains_another_and_the_job_has_every_sample_once(
    tmp_path: Path, models: Path, url: str, hub: FakeHub
) -> None:
    """1. Four workers on three nodes: one waits. 2. `up` again changes nothing. 3. A node dies in the middle
    of a job, and another joins. 4. The job is complete. 5. Fewer workers, then none."""
    target = random_target(models / "target", hidden=64)
    shop = Shop.open(tmp_path, target, database_url=url, lease_s=10.0, hub_endpoint=hub.url, hub_token=TOKEN)
    samples = conversations(300)
    with pool_of(shop, nodes=3) as pool:
        pool.up(4)
        pool.reach("running", "running", "running", "waiting")
        asyncio.run(until(lambda: len(pool.workers()) == 3))
        before = pool.workers()
        pool.up(4)
        assert pool.workers() == before

        job_id = shop.submit(request(target, samples, hub={"repo_id": REPO}))
        shop.plan()
        asyncio.run(until(lambda: shop.store.read(jobs.job, job_id).progress.units_done > 0))
        lost = pool.cluster.list_all_nodes()[-1]
        orphans = pool.workers(lost)
        pool.cluster.remove_node(lost, allow_graceful=False)
        for pid in orphans:
            wait_for_end(pid)
        assert len(orphans) == 1
        pool.cluster.add_node(num_cpus=1)
        pool.reach("running", "running", "running", "waiting")

        asyncio.run(until(partial(published, shop, job_id), patience_s=600.0))
        assert is_whole(shop, hub, job_id).samples_written == len(samples)
        assert max(unit.epoch for unit in shop.store.read(units.of_job, job_id)) <= 2

        pool.up(1)
        pool.reach("running")
        assert "\trunning\t" in pool.quarry_ray("status", codes=(0, 3))
        assert json.loads(pool.quarry_ray("status", "--json"))["state"] == "running"
        assert len(pool.workers()) == 1
        pool.quarry_ray("down")
        assert pool.workers() == set()
        assert pool.quarry_ray("status", codes=(3,)) == ""
    shop.store.close()


@pytest.mark.slow
def test_workers_of_other_settings_are_replaced(tmp_path: Path, models: Path, url: str) -> None:
    """1. A pool of two runs. 2. `up` with another setting: two other processes run.

    Ray's control store never has the settings' secrets."""
    target = random_target(models / "target", hidden=64)
    shop = Shop.open(tmp_path, target, database_url=url, hub_token=TOKEN)
    with pool_of(shop, nodes=2) as pool:
        pool.up(2)
        asyncio.run(until(lambda: len(pool.workers()) == 2))
        before = pool.workers()
        assert not store_holds(pool.cluster, TOKEN.encode())
        assert store_holds(pool.cluster, tmp_path.name.encode()), "what a worker is given"
        pool.shop = Shop.open(tmp_path, target, database_url=url, lease_s=30.0)
        pool.up(2)
        asyncio.run(until(lambda: len(pool.workers()) == 2))
        assert not before & pool.workers()
        pool.quarry_ray("down")
        pool.shop.store.close()
    shop.store.close()


@pytest.mark.engine
@pytest.mark.long
def test_a_job_on_the_real_engine_runs_on_a_node_of_the_cluster(
    tmp_path: Path, models: Path, url: str, hub: FakeHub
) -> None:
    target = random_target(models / "target", hidden=64)
    place = {"hub_endpoint": hub.url, "hub_token": TOKEN}
    shop = vllm_shop(tmp_path, target, database_url=url, cpu_kv_cache_gib=1, **place)
    with pool_of(shop, nodes=1) as pool:
        pool.up(1)
        job_id = shop.submit(request(target, conversations(8), canary="run", hub={"repo_id": REPO}))
        shop.plan()
        asyncio.run(until(partial(published, shop, job_id), patience_s=600.0, poll_s=0.5))
        assert is_whole(shop, hub, job_id).samples_written == 8
        pool.quarry_ray("down")
        assert pool.workers() == set()
    shop.store.close()


def test_a_node_that_does_not_know_the_database_runs_no_worker_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("QUARRY_DATABASE_URL", raising=False)
    actor = WorkerActor(Settings(data_dir=tmp_path).model_dump_json())
    _, problem = actor.describe()
    assert "QUARRY_DATABASE_URL" in problem and "ray start" in problem
    assert actor.drain()


def published(shop: Shop, job_id: str) -> bool:
    """Say whether a job is complete, having published it if that was its turn."""
    shop.publish()
    job = shop.store.read(jobs.job, job_id)
    assert job.state not in ENDED - {JobState.COMPLETED}, job.problem
    return job.state is JobState.COMPLETED
