"""Two models one after the other in one worker, which stops one engine and starts the next."""

import asyncio
from pathlib import Path

import pytest

from schemas.dataset.manifest import Manifest
from schemas.digest import canonical_sha256
from schemas.job import JobState
from schemas.names import manifest_path
from service.store import jobs
from service.work.worker_process import WorkerProcess, worker_command
from tests.support.device import MEMORY, ON_CUDA
from tests.support.engine_bench import until
from tests.support.jobs import ENDED, Shop, conversations, request
from tests.support.tiny_model import random_target

BATCH_TOKENS = 16384 if ON_CUDA else 4096
"""vLLM's own choice for a Hopper and a CPU; its library's default is 2048, whatever the device."""
OPTIONS = {"enforce_eager": True, "compilation_config": {"custom_ops": ["none"]}, **MEMORY}


def made_with(shop: Shop, job_id: str) -> dict[str, object]:
    path = shop.settings.dataset_dir(job_id) / manifest_path(job_id)
    return dict(Manifest.model_validate_json(path.read_bytes()).provenance.engine.options)


@pytest.mark.engine
@pytest.mark.timeout(400)
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

            asyncio.run(until(over, patience_s=300.0, poll_s=0.1))
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
