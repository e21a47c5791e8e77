"""The estimate is what planning the same request gives."""

from pathlib import Path
from typing import Any

import pytest

from schemas.dataset.entries import FileEntry
from schemas.request import ExtractRequest
from service.errors import OptionRefused, SourceRefused
from service.plan.estimate import estimate_request
from service.publish.push import early_batches
from service.settings import Settings
from service.store import NewJob, Store, jobs, migration
from tests.support import templates
from tests.support.roles import run_planning
from tests.support.store_cases import job_id

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
    assert (estimate.shards, estimate.commits) == (2, 1)
    assert not settings.data_dir.exists()


@pytest.mark.parametrize(("compression", "stored"), [("none", 256), ("planes", None), ("fp8", 2 * (64 + 4))])
def test_what_is_stored_is_told_where_it_does_not_depend_on_the_states(
    tmp_path: Path, compression: str, stored: int | None
) -> None:
    settings = Settings(data_dir=tmp_path / "data", model_roots=(tmp_path,))
    request = a_request(tmp_path, storage={"shard_bytes": 65_536, "compression": compression})
    estimate = estimate_request(request, settings)
    assert estimate.bytes == 351 * 256
    assert estimate.stored_bytes == (None if stored is None else 351 * stored)
    # As captured the 351 tokens are 90 kB, in fp8 48 kB: a shard is as large as what is stored.
    assert estimate.shards == (1 if compression == "fp8" else 2)


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


def test_each_rank_of_an_engine_writes_a_shard_of_a_unit(tmp_path: Path) -> None:
    settings = Settings(model_roots=(tmp_path,), unit_max_samples=3, tensor_parallel_size=2)
    samples = [{"token_ids": [i]} for i in range(97)]
    request = a_request(tmp_path, source={"kind": "inline", "samples": samples}, hub={"repo_id": "org/set"})
    estimate = estimate_request(request, settings)
    # 32 units of three samples and one of a single one, 33 indexes and four files of the job.
    assert (estimate.shards, estimate.commits) == (65, 2)


def test_answers_are_counted_at_their_longest(tmp_path: Path) -> None:
    settings = Settings(model_roots=(tmp_path,))
    estimate = estimate_request(a_request(tmp_path, generate={"max_tokens": 10}), settings)
    assert estimate.tokens == 351 + 4 * 10


def test_the_commits_are_those_that_the_publisher_makes_while_the_hub_takes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = [{"token_ids": [i]} for i in range(120)]
    request = a_request(tmp_path, source={"kind": "inline", "samples": samples}, hub={"repo_id": "org/set"})
    settings = Settings(model_roots=(tmp_path,), unit_max_samples=1)
    estimate = estimate_request(request, settings)
    files = [FileEntry(path=str(i), sha256="0" * 64, bytes=1) for i in range(2 * estimate.shards + 2)]
    assert estimate.shards == 120 and estimate.commits == len(early_batches(files)) + 1
    monkeypatch.setattr("service.artifacts.folder_limit.MAX_FOLDER_FILES", 119)
    with pytest.raises(OptionRefused, match="more than 119 shards"):
        estimate_request(request, settings)


def test_an_estimate_meets_the_errors_of_the_job(tmp_path: Path) -> None:
    request = a_request(tmp_path, source={"kind": "file", "path": "missing.jsonl"})
    with pytest.raises(SourceRefused):
        estimate_request(request, Settings(model_roots=(tmp_path,), source_roots=(tmp_path,)))
