"""Columns of a source become labels in the index, which readers and the field's tools read as they are."""

import json
from pathlib import Path
from typing import Any

import datasets
import duckdb
import polars
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from schemas.job import JobState
from schemas.request import ExtractRequest
from service.proof.verify import verify_dataset
from service.reader import QuarryDataset, ReaderError
from service.store import JobRow
from tests.support.jobs import Shop

ROWS: list[dict[str, Any]] = [
    {"id": "a", "text": "one", "lang": "de", "score": 0.5, "other": "not asked for"},
    {"id": "b", "text": "two", "lang": None, "score": [1, 2]},
    {"id": "c", "text": "three", "labels": {"lang": "fr", "score": "high"}},
    {"id": "d", "text": "four", "lang": "x" * 1001},
]
LANG, SCORE = ["de", None, "fr"], ["0.5", "[1, 2]", "high"]


def run(shop: Shop, target: Path, source: dict[str, Any], **options: Any) -> JobRow:
    body = {
        "model": str(target),
        "source": source,
        "loss": "all",
        "canary": "skip",
        "labels": ["lang", "score"],
    }
    return shop.run(ExtractRequest.model_validate(body | options))


@pytest.fixture
def labelled(shop: Shop, target: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "rows"
    folder.mkdir()
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    shop.settings = shop.settings.model_copy(update={"source_roots": (folder,), "unit_max_samples": 2})
    job = run(shop, target, {"kind": "file", "path": "rows.jsonl"})
    assert job.state is JobState.COMPLETED, job.problem
    assert (job.progress.samples_written, job.progress.samples_rejected) == (3, 1)
    return shop.settings.dataset_dir(job.id)


def test_the_index_holds_them_in_the_order_of_its_rows(labelled: Path) -> None:
    assert verify_dataset(labelled).ok
    dataset = QuarryDataset(labelled)
    assert (dataset.labels("lang"), dataset.labels("score")) == (LANG, SCORE)
    with pytest.raises(ReaderError, match="label 'other' cannot be read: it has no column"):
        dataset.labels("other")


def test_the_tools_of_the_field_read_them_as_columns_of_text(labelled: Path, tmp_path: Path) -> None:
    files = sorted(map(str, labelled.glob("index/*/*.parquet")))
    query = "SELECT label_lang FROM read_parquet(?) WHERE label_score = '0.5'"
    assert duckdb.execute(query, [files]).fetchall() == [("de",)]
    assert polars.read_parquet(files)["label_lang"].to_list() == LANG
    index = datasets.load_dataset(str(labelled), split="train", cache_dir=str(tmp_path / "cache"))
    assert index["label_score"][:] == SCORE


def test_a_column_of_parquet_and_labels_of_inline_samples(shop: Shop, target: Path, tmp_path: Path) -> None:
    folder = tmp_path / "rows"
    folder.mkdir()
    table = pa.table({"text": ["one", "two"], "lang": ["de", None], "score": [1, 2]})
    pq.write_table(table, folder / "rows.parquet")
    shop.settings = shop.settings.model_copy(update={"source_roots": (folder,)})
    job = run(shop, target, {"kind": "file", "path": "."})
    dataset = QuarryDataset(shop.settings.dataset_dir(job.id))
    assert (dataset.labels("lang"), dataset.labels("score")) == (["de", None], ["1", "2"])
    inline = {
        "kind": "inline",
        "samples": [{"text": "one", "labels": {"lang": "de", "more": "x"}}, {"text": "two"}],
    }
    request = ExtractRequest.model_validate({"model": str(target), "source": inline, "labels": ["lang"]})
    job = shop.run(request.model_copy(update={"canary": "skip"}), "inline")
    assert QuarryDataset(shop.settings.dataset_dir(job.id)).labels("lang") == ["de", None]


def test_samples_are_the_same_whatever_their_labels(labelled: Path, shop: Shop, target: Path) -> None:
    """Neither the ids nor the shards of a job without labels differ from those of one with them."""
    body = {"model": str(target), "source": {"kind": "file", "path": "rows.jsonl", "limit": 3}}
    request = ExtractRequest.model_validate(body | {"loss": "all", "canary": "skip"})
    plain = shop.run(request, "plain")
    assert QuarryDataset(shop.settings.dataset_dir(plain.id)).sample_ids == QuarryDataset(labelled).sample_ids


PARQUET = pa.table({"text": ["one", "two"], "lang": pa.nulls(2, pa.string()), "score": [1, 2]})


def test_a_name_that_no_sample_has_is_refused_once_all_are_read(
    shop: Shop, target: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "rows"
    folder.mkdir()
    pq.write_table(PARQUET, folder / "rows.parquet")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    shop.settings = shop.settings.model_copy(update={"source_roots": (folder,)})
    inline = {"kind": "inline", "samples": [{"text": "one", "labels": {"lang": "de"}}, {"text": "two"}]}
    files = [{"kind": "file", "path": f"rows.{kind}"} for kind in ("jsonl", "parquet")]
    for number, source in enumerate((*files, inline)):
        for labels, missing in ((["langs", "lang", "a"], "'a', 'langs'"), (["lang"], None)):
            body = {"model": str(target), "source": source, "loss": "all", "canary": "skip", "labels": labels}
            job = shop.run(ExtractRequest.model_validate(body), f"{number}{len(labels)}")
            if missing is None:
                assert job.state is JobState.COMPLETED, job.problem
                continue
            assert job.state is JobState.FAILED and job.problem is not None
            assert job.problem.field == "labels" and job.problem.cure
            assert job.problem.detail == f"no sample of the source has the column {missing}"


def test_a_name_that_only_samples_of_other_parts_have_is_no_fault(
    shop: Shop, target: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "rows"
    folder.mkdir()
    shop.settings = shop.settings.model_copy(update={"source_roots": (folder,)})
    body = {"model": str(target), "loss": "all", "canary": "skip", "labels": ["score", "other"]}
    (folder / "rows.jsonl").write_text('{"text": "one"}\n{"text": "two", "score": 1, "other": 2}\n')
    source = {"kind": "file", "path": "rows.jsonl"}
    part = {"index": 1, "of": 2}
    job = shop.run(ExtractRequest.model_validate(body | {"source": source, "part": part}))
    assert job.state is JobState.COMPLETED, job.problem
    assert QuarryDataset(shop.settings.dataset_dir(job.id)).labels("score") == [None]


@pytest.mark.parametrize("labels", [["lang", "Lang"], ["a b"], [""], ["x"] * 33], ids=str)
def test_names_that_no_column_can_have_are_refused(target: Path, labels: list[str]) -> None:
    body = {"model": str(target), "source": {"kind": "inline", "samples": [{"text": "x"}]}, "labels": labels}
    with pytest.raises(ValidationError, match="labels"):
        ExtractRequest.model_validate(body)
