"""vLLM's own metrics beside a worker's: passed on, by one engine after another, as the dashboard asks."""

import asyncio
import json
from pathlib import Path

import httpx2
import pytest

from schemas.job import JobState
from service.store import jobs
from service.work.worker_process import WorkerProcess, worker_command
from tests.contract.test_worker_metrics import values
from tests.support.device import MEMORY
from tests.support.jobs import ENDED, Shop, conversations, request
from tests.support.ports import free_port
from tests.support.prometheus import FOLDER, dashboard_queries, names_in
from tests.support.real_engine import VLLM
from tests.support.tiny_model import random_target
from tests.support.waiting import until

ASKED = {name for query in dashboard_queries().values() for name in names_in(query) if "vllm:" in name}


@pytest.mark.engine
@pytest.mark.long
def test_what_vllm_counts_is_passed_on_by_one_engine_and_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. A job runs, and vLLM has counted its tokens. 2. So does one of another model, on another engine.

    The lines of vLLM and of the worker are objects, by the file that the compose overlay names.
    """
    monkeypatch.setenv("VLLM_LOGGING_CONFIG_PATH", str(FOLDER / "vllm-logging.json"))
    targets = [random_target(tmp_path / "models" / str(seed), seed=seed, hidden=64) for seed in (1, 2)]
    port = free_port()
    options = {"enforce_eager": True, **MEMORY}
    shop = Shop.open(
        tmp_path,
        targets[0],
        engine=VLLM,
        engine_options=options,
        poll_s=0.1,
        worker_metrics_port=port,
        log_format="json",
    )
    with (tmp_path / "log").open("wb") as log:
        worker = WorkerProcess(worker_command(), shop.settings.with_secrets(), log)
        try:
            for number, target in enumerate(targets, start=1):
                job_id = shop.submit(request(target, conversations(4)), target.name)

                def over(job_id: str = job_id) -> bool:
                    return worker.exit_code() is not None or shop.store.read(jobs.state, job_id) in ENDED

                asyncio.run(until(over, patience_s=400.0, poll_s=0.1))
                job = shop.store.read(jobs.job, job_id)
                assert job.state is JobState.COMPLETED, (job.problem, (tmp_path / "log").read_text())
                text = httpx2.get(f"http://127.0.0.1:{port}/metrics", trust_env=False).raise_for_status().text
                exposed = {line.partition("{")[0] for line in text.splitlines() if line.startswith("vllm:")}
                assert len(ASKED) >= 6 and exposed >= ASKED
                now = values(port)
                assert now["committed_samples_total"] == 4 * number
                counted = [
                    value for name, value in now.items() if name.startswith("vllm:prompt_tokens_total{")
                ]
                assert len(counted) == 1 and counted[0] >= job.progress.tokens_written
        finally:
            worker.terminate()
            asyncio.run(until(lambda: worker.exit_code() is not None, patience_s=120.0, poll_s=0.1))
            shop.store.close()
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines() if line[:1] == "{"]
    processes = {line["pid"] for line in lines if line["logger"].startswith("vllm.")}
    assert worker.pid in processes and len(processes) > len(targets)
