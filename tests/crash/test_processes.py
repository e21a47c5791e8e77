"""Every process of a service is killed at random points of a job: server, worker, planner, reference, engine.

`quarry serve` runs as it is deployed. What has ended is started again, as a person or systemd would, and
nothing else is done. One form runs two of everything on one PostgreSQL, which crashes under way too.
"""

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from schemas.job import JobState
from service.proof.verify import verify_dataset
from service.store import Store, jobs, migration
from tests.crash.conftest import MODE
from tests.crash.oracle import assert_right, make_target, service
from tests.crash.processes import PATIENCE_S, Machine, disturb, services
from tests.support.desk import REPO, TOKEN, etags, writable_hub
from tests.support.jobs import conversations, request
from tests.support.pg import running_postgres
from tests.support.waiting import wait_until

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
    "one-with-a-machine-that-is-lost": {
        "services": 1,
        "engine": "tests.support.brisk_engine:BriskEngine",
        "canary": "skip",
        "hub": {"repo_id": REPO},
        "storage": {"keep_local": False},
        "roles": ("plan", "store", "finish"),
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
@pytest.mark.usefixtures("worker_apart")
@pytest.mark.parametrize("form", FORMS if MODE == "all" else list(FORMS)[:6])
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
        if "roles" in chosen:
            changes["roles"] = chosen["roles"]
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
        machine = Machine(settings, tmp_path) if "roles" in chosen else None
        if machine is not None:
            stack.callback(machine.kill)
        posted, first = body.model_dump(mode="json"), chosen.get("first")
        job_id = disturb(made, store, posted, disturbances, kills, first, tally, machine=machine)
        job = store.read(jobs.job, job_id)
        assert job.state is JobState.COMPLETED, job.problem
        dataset = settings.dataset_dir(job_id)
        if "hub" in chosen:
            titles = Counter(commit.title for commit in hub.repo(REPO).commits)
            tally["commits while others were captured"] += titles[f"Add units of {job_id}"]
            there = hub.repo(REPO).head.tree
            if "storage" in chosen:
                wait_until(lambda: not list(dataset.glob("data/*/*")), patience_s=PATIENCE_S)
                dataset = tmp_path / "downloaded"
                for path, blob in there.items():
                    (dataset / path).parent.mkdir(parents=True, exist_ok=True)
                    (dataset / path).write_bytes(hub.content(blob))
            else:
                own = {path: blob.etag for path, blob in there.items() if path != ".gitattributes"}
                assert etags(dataset).items() >= own.items()
    if chosen["canary"] == "skip":
        assert_right(dataset, target, num_samples)
    else:
        report = verify_dataset(dataset, model_folder=target)
        assert report.ok and report.rows == num_samples, report.findings
