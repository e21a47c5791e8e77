"""The estimate is what planning the same request gives."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.workload import TARGETS
from schemas.dataset.manifest import FileEntry
from schemas.request import ExtractRequest
from service.errors import SourceRefused
from service.plan.estimate import estimate_request
from service.plan.sizing import size
from service.publish.push import batches
from service.settings import Settings
from service.store import NewJob, Store, jobs, migration
from tests.support import templates
from tests.support.roles import run_planning
from tests.support.sizing_page import (
    CORE_S_PER_GB,
    DEFAULTS,
    DRAIN_BYTES_PER_S,
    PAGE,
    PROOF_CORE_S_PER_GB,
    WRITER_BYTES_PER_S,
    WRITER_CORE_S_PER_GB,
    render,
)
from tests.support.store_cases import job_id

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
HEAD = ("Head.opinion", "Head.gaps")
"""What torch's other threads do for the proof."""

SAMPLES = [{"token_ids": [1] * n} for n in (200, 100, 50, 1)] + [{"token_ids": [999_999]}, {"token_ids": []}]


def a_request(root: Path, **options: Any) -> ExtractRequest:
    model = templates.write_target(root / "model")
    body = {
        "model": str(model),
        "layers": [2],
        "storage": {"shard_bytes": 65_536},
        "source": {"kind": "inline", "samples": SAMPLES},
    }
    return ExtractRequest.model_validate(body | options)


def test_an_estimate_adds_up_and_writes_nothing(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path / "data", model_roots=(tmp_path,))
    estimate = estimate_request(a_request(tmp_path, hub={"repo_id": "org/set"}), settings)
    assert (estimate.samples, estimate.rejected, estimate.tokens) == (4, 2, 351)
    assert (estimate.bytes_per_token, estimate.bytes, estimate.layer_ids) == (256, 351 * 256, (2, 8))
    assert (estimate.shards, estimate.commits, estimate.sizing) == (2, 1, None)
    assert not settings.data_dir.exists()


@pytest.mark.parametrize(("compression", "stored"), [("none", 256), ("planes", None), ("fp8", 2 * (64 + 4))])
def test_what_is_stored_is_told_where_it_does_not_depend_on_the_states(
    tmp_path: Path, compression: str, stored: int | None
) -> None:
    settings = Settings(data_dir=tmp_path / "data", model_roots=(tmp_path,))
    request = a_request(tmp_path, storage={"shard_bytes": 65_536, "compression": compression})
    estimate = estimate_request(request, settings, tokens_per_s=1000.0)
    assert estimate.bytes == 351 * 256
    assert estimate.stored_bytes == (None if stored is None else 351 * stored)
    assert estimate.sizing is not None
    # As captured the 351 tokens are 90 kB, in fp8 48 kB: a shard is as large as what is stored.
    assert estimate.shards == (1 if compression == "fp8" else 2)
    assert estimate.sizing.drain_bytes_per_s == 256_000
    assert estimate.sizing.disk_bytes_per_s == 1000 * (stored or 256)
    assert estimate.sizing.uplink_bits_per_s == 8000 * (stored or 256)


def test_a_rate_says_what_it_asks_of_the_host() -> None:
    asked = size(351, 256, 4e6, 8, DEFAULTS)
    assert (asked.gpus, asked.seconds) == (8, pytest.approx(351 / 32e6))
    assert asked.drain_bytes_per_s == 4e6 * 256
    assert asked.drain_share == pytest.approx(1.024e9 / DRAIN_BYTES_PER_S)
    assert asked.writer_threads == 2
    assert asked.cores == pytest.approx(1.024 * CORE_S_PER_GB)
    assert (asked.disk_bytes_per_s, asked.uplink_bits_per_s) == (8 * 1.024e9, 64 * 1.024e9)
    assert pytest.approx(CORE_S_PER_GB) == DEFAULTS.sizing_core_s_per_gb


def test_an_estimate_agrees_with_the_plan(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path, model_roots=(tmp_path,))
    request = a_request(tmp_path)
    estimate = estimate_request(request, settings)
    store = Store(settings.database())
    store.write(migration.migrate)
    store.write(jobs.submit, NewJob.of(job_id(1), "key", request))
    run_planning(store, settings, "planner", lambda: False)
    progress = store.read(jobs.job, job_id(1)).progress
    store.close()
    planned = (
        progress.samples_planned - progress.samples_rejected,
        progress.tokens_planned,
        progress.units_planned,
    )
    assert planned == (estimate.samples, estimate.tokens, estimate.shards) and estimate.commits == 0


def test_answers_are_counted_at_their_longest(tmp_path: Path) -> None:
    settings = Settings(model_roots=(tmp_path,))
    estimate = estimate_request(a_request(tmp_path, generate={"max_tokens": 10}), settings)
    assert estimate.tokens == 351 + 4 * 10


def test_the_commits_are_those_that_the_publisher_makes(tmp_path: Path) -> None:
    samples = [{"token_ids": [i]} for i in range(120)]
    request = a_request(tmp_path, source={"kind": "inline", "samples": samples}, hub={"repo_id": "org/set"})
    settings = Settings(model_roots=(tmp_path,), unit_max_samples=1)
    estimate = estimate_request(request, settings)
    files = [FileEntry(path=str(i), sha256="0" * 64, bytes=1) for i in range(2 * estimate.shards + 2)]
    assert estimate.shards == 120 and estimate.commits == len(batches(files)[0]) + 1


def test_an_estimate_meets_the_errors_of_the_job(tmp_path: Path) -> None:
    request = a_request(tmp_path, source={"kind": "file", "path": "missing.jsonl"})
    with pytest.raises(SourceRefused):
        estimate_request(request, Settings(model_roots=(tmp_path,), source_roots=(tmp_path,)))


def test_the_page_on_sizing_is_made_from_the_same_arithmetic() -> None:
    assert PAGE.read_text() == render(), "run python -m tests.support.sizing_page"


def test_a_rate_above_one_writers_asks_for_more_of_them() -> None:
    assert size(1, 1, 2.5 * WRITER_BYTES_PER_S, 1, DEFAULTS).writer_threads == 3
    slow = DEFAULTS.model_copy(update={"sizing_writer_bytes_per_s": WRITER_BYTES_PER_S / 2})
    assert size(1, 1, 2.5 * WRITER_BYTES_PER_S, 1, slow).writer_threads == 5


def test_what_sizing_goes_by_is_what_was_measured() -> None:
    writer = json.loads((RESULTS / "cpu-writer.json").read_text())["writer"]["summary"]["quarry-alone"]
    assert pytest.approx(writer["gb_per_s"]["median"] * 1e9, rel=0.2) == WRITER_BYTES_PER_S
    assert pytest.approx(writer["cpu_s_per_gb"]["median"], rel=0.2) == WRITER_CORE_S_PER_GB
    job = json.loads((RESULTS / "job.json").read_text())["jobs"]["default-units"]
    share = sum(job["checks"][name] for name in ("service.capture.unit_run.check_unit", *HEAD))
    state_gb = job["tokens"] * TARGETS["compute"].state_bytes_per_token / 1e9
    proof = share * job["seconds"] * job["cores"] / state_gb
    assert proof == pytest.approx(PROOF_CORE_S_PER_GB, rel=0.2)
