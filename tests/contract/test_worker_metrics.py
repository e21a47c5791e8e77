"""A worker's own `/metrics`, and its JSON log: a job's samples at every stage, on any engine."""

import json
import time
from pathlib import Path

import httpx2
import pytest

from schemas.job import JobState
from service.client import Quarry
from tests.support.ports import free_port
from tests.support.service_process import SAMPLES, body_of, serving
from tests.support.tiny_model import random_target

TOKENS = sum(len(sample["token_ids"]) for sample in SAMPLES)
STAGES = ("prefilled", "sealed", "proven", "committed")
PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_target(tmp_path_factory.mktemp("target") / "model", layers=4, hidden=64)


def values(port: int) -> dict[str, float]:
    """Return what the worker says, without the beginning that all its names have."""
    text = httpx2.get(f"http://127.0.0.1:{port}/metrics", trust_env=False).raise_for_status().text
    lines = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    return {name.removeprefix("quarry_worker_"): float(value) for name, value in lines}


def test_samples_pass_every_stage_on_one_engine_and_on_the_next(tmp_path: Path, target: Path) -> None:
    """1. A job is captured. 2. So is one of other layers, on another engine: its ranks alone count anew.

    Every line that the service, the worker and the planner log is JSON, and those of a unit name it.
    """
    port, lines = free_port(), []
    settings = {"QUARRY_WORKER_METRICS_PORT": str(port), "QUARRY_LOG_FORMAT": "json"}
    with (
        serving(tmp_path / "data", on_line=lines.append, **settings) as service,
        Quarry(service.url) as quarry,
    ):
        for number, layers in ((1, [1, 2]), (2, [1, 3])):
            answer = httpx2.post(
                f"{service.url}/extract", json=body_of(target, layers=layers), trust_env=False, timeout=60
            )
            job_id = answer.raise_for_status().json()["id"]
            *_, last = quarry.follow(job_id)
            assert last.state is JobState.COMPLETED, last.problem
            # The connector is asked once a second.
            deadline = time.monotonic() + PATIENCE_S
            while (now := values(port)).get('drained_samples_total{rank="0"}') != len(SAMPLES):
                assert time.monotonic() < deadline, now
                time.sleep(0.1)
            for stage in STAGES:
                assert now[f"{stage}_samples_total"] == number * len(SAMPLES), stage
                assert now[f"{stage}_tokens_total"] == number * TOKENS, stage
            of_rank = {
                name.removesuffix('{rank="0"}'): value for name, value in now.items() if "rank" in name
            }
            sizes = [now[f"{stage}_bytes_total"] for stage in ("sealed", "proven", "committed")]
            assert sizes == [sizes[0]] * 3
            assert sizes[0] > of_rank["drained_bytes_total"] == TOKENS * 3 * 64 * 2
            assert (now["committed_units_total"], now["rejected_samples_total"]) == (number, 0)
            assert of_rank["pool_bytes"] > of_rank["pool_used_bytes"] == 0
            assert of_rank["writers"] >= 2 and of_rank["writer_busy_seconds_total"] > 0
            assert min(now[f'engine_seconds_total{{state="{state}"}}'] for state in ("none", "busy")) > 0
            assert min(now[f'wait_seconds_total{{reason="{reason}"}}'] for reason in ("work", "start")) > 0
    logged = [json.loads(line) for line in lines]
    assert {line["pid"] for line in logged} >= {service.process.pid, service.worker}
    starts = [line for line in logged if line["message"].startswith("starting the engine")]
    assert [(line["task"], line["unit"], line["epoch"]) for line in starts] == [("capture", 0, 1)] * 2
    assert starts[-1]["job"] == job_id
