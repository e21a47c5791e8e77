"""One worker that stops one engine and starts the next: for another model, or since its core was killed."""

import asyncio
from pathlib import Path

import psutil
import pytest

from schemas.dataset.manifest import Manifest
from schemas.digest import canonical_sha256
from schemas.job import JobState
from schemas.names import manifest_path
from service.store import TaskState, jobs, units
from service.work.worker_process import WorkerProcess, worker_command
from tests.support.device import MEMORY, ON_CUDA
from tests.support.jobs import ENDED, Shop, conversations, request
from tests.support.real_engine import VLLM, assert_states, by_id, stored_rows
from tests.support.tiny_model import random_target
from tests.support.waiting import until

BATCH_TOKENS = 16384 if ON_CUDA else 4096
"""vLLM's own choice for a Hopper and a CPU; its library's default is 2048, whatever the device."""
OPTIONS = {"enforce_eager": True, "compilation_config": {"custom_ops": ["none"]}, **MEMORY}
NUM_SAMPLES = 600
pytestmark = pytest.mark.usefixtures("worker_apart")


def made_with(shop: Shop, job_id: str) -> dict[str, object]:
    path = shop.settings.dataset_dir(job_id) / manifest_path(job_id)
    return dict(Manifest.model_validate_json(path.read_bytes()).provenance.engine.options)


@pytest.mark.engine
def test_an_engine_that_is_stopped_for_another_model_leaves_its_worker_at_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. The operator has processes forked. 2. Two jobs of two models run in one worker, whose first engine
    is stopped by a signal. 3. Both end well, and the worker lives on."""
    targets = [random_target(tmp_path / "models" / str(seed), seed=seed, hidden=64) for seed in (1, 2)]
    shop = Shop.open(
        tmp_path,
        targets[0],
        engine="tests.support.unforced_engine:UnforcedEngine",
        engine_options=OPTIONS,
        cpu_kv_cache_gib=1,
    )
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "fork")
    monkeypatch.setenv("VLLM_FLOAT32_MATMUL_PRECISION", "highest")
    with (tmp_path / "log").open("wb") as log:
        worker = WorkerProcess(worker_command(), shop.settings.with_secrets(), log)
        try:
            job_ids = [shop.submit(request(target, conversations(4)), target.name) for target in targets]

            def over() -> bool:
                return (
                    worker.exit_code() is not None
                    or {shop.store.read(jobs.state, job) for job in job_ids} <= ENDED
                )

            asyncio.run(until(over, patience_s=400.0, poll_s=0.1))
            assert worker.exit_code() is None, f"the worker ended: {worker.exit_code()}"
            for job in [shop.store.read(jobs.job, job_id) for job_id in job_ids]:
                assert job.state is JobState.COMPLETED, (job.problem, (tmp_path / "log").read_text())
        finally:
            worker.kill()
            asyncio.run(until(lambda: worker.exit_code() is not None))
    options = made_with(shop, job_ids[1])
    assert options["kv_cache_dtype"] == "auto"
    assert options["operator_options_sha256"] == canonical_sha256(OPTIONS)
    assert options["max_num_batched_tokens"] == BATCH_TOKENS
    assert options["VLLM_FLOAT32_MATMUL_PRECISION"] == "highest"
    shop.store.close()


@pytest.mark.engine
def test_an_engine_whose_core_is_killed_is_started_again_and_every_row_is_captured_once(
    tmp_path: Path,
) -> None:
    """1. A job of many units runs. 2. Once one of them is proven, the engine's core is killed, whose device
    memory is not free at once. 3. The worker starts the engine again, and every row is there and right."""
    target = random_target(tmp_path / "models" / "target", hidden=64, layers=8)
    shop = Shop.open(
        tmp_path,
        target,
        engine=VLLM,
        engine_options=OPTIONS,
        cpu_kv_cache_gib=1,
        unit_max_samples=10,
    )
    prompts = ([20 + n % 29, 5 + n // 29 % 37, 6 + n // 1073] for n in range(NUM_SAMPLES))
    body = request(target, by_id(list(prompts)), loss="all", dtype="float32", layers=[1, 2])
    with (tmp_path / "log").open("wb") as log:
        worker = WorkerProcess(worker_command(), shop.settings.with_secrets(), log)
        try:
            job_id = shop.submit(body)

            def committed() -> int:
                return sum(unit.state is TaskState.DONE for unit in shop.store.read(units.of_job, job_id))

            asyncio.run(until(lambda: committed() > 0, patience_s=400.0, poll_s=0.02))
            # The core holds the model.
            children = psutil.Process(worker.pid).children(recursive=True)
            max(children, key=lambda child: child.memory_info().rss).kill()
            left = NUM_SAMPLES // 10 - committed()
            asyncio.run(
                until(lambda: shop.store.read(jobs.state, job_id) in ENDED, patience_s=400.0, poll_s=0.1)
            )
            job = shop.store.read(jobs.job, job_id)
            assert job.state is JobState.COMPLETED, (job.problem, (tmp_path / "log").read_text())
        finally:
            worker.kill()
            asyncio.run(until(lambda: worker.exit_code() is not None))
    assert left > 0, "the job had ended before the core was killed"
    rows = stored_rows(shop.settings.dataset_dir(job_id), job_id, (1, 2, 8))
    assert len(rows) == NUM_SAMPLES == len(shop.rows(job_id))
    assert_states(rows, target)
    shop.store.close()
