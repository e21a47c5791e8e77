"""One worker lives on while keys come back, jobs are deleted and checkpoints are overwritten in their place.

Each job's states must be those of the model that it was planned with, by a plain forward pass.
"""

import asyncio
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from schemas.job import JobState
from service.control.deletion import delete_job
from service.control.request_body import CheckedRequest
from service.control.submit import submit
from service.errors import IdempotencyConflict
from service.settings import Settings
from service.store import jobs
from service.work.worker_process import WorkerProcess, worker_command
from tests.support.engine_bench import relative_T
from tests.support.jobs import ENDED, Shop, conversations, request
from tests.support.tiny_model import random_target
from tests.support.waiting import until
from tests.support.whole_model import whole_states

OPTIONS = {"enforce_eager": True, "compilation_config": {"custom_ops": ["none"]}}
MODEL: dict[str, Any] = {"engine": "tests.support.model_engine:ModelEngine"}
VLLM: dict[str, Any] = {"engine": Settings().engine, "engine_options": OPTIONS, "cpu_kv_cache_gib": 1}
ENGINES = [
    pytest.param(MODEL, marks=pytest.mark.slow, id="model"),
    pytest.param(VLLM, marks=[pytest.mark.engine, pytest.mark.long], id="vllm"),
]
TOLERANCE = 1e-3
"""Of float32 through eight layers; another seed's states are more than 0.5 off."""


@dataclass
class Node:
    """A service whose one worker is never restarted."""

    shop: Shop
    worker: WorkerProcess
    folder: Path

    def run(self, key: str, checkpoint: Path, **changes: Any) -> str:
        """Submit a job and wait until it is complete; return its id."""
        body = request(checkpoint, conversations(4), dtype="float32", **changes)
        job_id = submit(CheckedRequest.of(body), key, self.shop.store, self.shop.settings).id

        def over() -> bool:
            return self.worker.exit_code() is not None or self.shop.store.read(jobs.state, job_id) in ENDED

        asyncio.run(until(over, patience_s=600.0, poll_s=0.1))
        job = self.shop.store.read(jobs.job, job_id)
        assert job.state is JobState.COMPLETED, (job.problem, (self.folder / "log").read_text()[-4000:])
        return job_id

    def errors(self, job_id: str, weights: Path) -> dict[int, float]:
        """Return the largest relative error of each layer of a job's rows, by the model in `weights`."""
        identity = self.shop.store.read(jobs.job, job_id).identity
        assert identity is not None
        rows = self.shop.rows(job_id)
        assert len(rows) == 4
        dtype = getattr(torch, identity.dtype)
        truth = whole_states(weights, [row["input_ids"] for row in rows], dtype)
        worst = dict.fromkeys(identity.layer_ids, 0.0)
        for row, states in zip(rows, truth, strict=True):
            for layer_id in identity.layer_ids:
                stored = torch.frombuffer(bytearray(row[f"layer_{layer_id}"]), dtype=dtype)
                stored_TH = stored.view(row["num_tokens"], identity.hidden_size).float()
                off = float(relative_T(stored_TH, states[layer_id].float()).max())
                worst[layer_id] = max(worst[layer_id], off)
        return worst


@pytest.fixture(params=ENGINES)
def node(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Node]:
    shop = Shop.open(tmp_path, tmp_path / "models" / "any", **request.param)
    with (tmp_path / "log").open("wb") as log:
        worker = WorkerProcess(worker_command(), shop.settings.with_secrets(), log)
        try:
            yield Node(shop, worker, tmp_path)
            assert worker.exit_code() is None
        finally:
            worker.kill()
            asyncio.run(until(lambda: worker.exit_code() is not None))
    shop.store.close()


def target(folder: Path, seed: int) -> Path:
    return random_target(folder, seed=seed, hidden=64, layers=8)


def test_a_key_of_a_deleted_job_never_gives_its_engine_or_rows_to_another(node: Node, tmp_path: Path) -> None:
    """1. A job completes, and is deleted. 2. Its key comes back with another model: a conflict. 3. Under a
    new key the first model's folder, which holds other weights now, is captured by the same worker, then the
    other model with other layers."""
    base, right = (target(tmp_path / "models" / name, seed) for name, seed in (("base", 1), ("right", 2)))
    later = target(tmp_path / "later", 3)
    first = node.run("K", base, canary="run", layers=[1, 2])
    delete_job(node.shop.store, node.shop.settings, first, with_dataset=False)
    with pytest.raises(IdempotencyConflict, match=first):
        node.run("K", right, canary="run", layers=[1, 2])
    shutil.copytree(later, base, dirs_exist_ok=True)
    second = node.run("K2", base, canary="run", layers=[1, 2])
    third = node.run("K3", right, canary="run", layers=[1, 3])
    assert len({first, second, third}) == 3
    for job_id, weights in ((second, later), (third, right)):
        assert max(node.errors(job_id, weights).values()) < TOLERANCE


def test_a_checkpoint_that_is_overwritten_in_place_is_another_model(node: Node, tmp_path: Path) -> None:
    """Nights over one folder, whose weights are replaced between them and put back in the end.

    No canary, which would refuse the wrong rows.
    """
    latest = tmp_path / "models" / "latest"
    for night, seed in enumerate((1, 2, 1)):
        kept = target(tmp_path / "kept" / str(seed), seed)
        shutil.copytree(kept, latest, dirs_exist_ok=True)
        job_id = node.run(f"night {night}", latest, canary="skip")
        assert max(node.errors(job_id, kept).values()) < TOLERANCE
