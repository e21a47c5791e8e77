"""A right dataset, its page, and ways to make it wrong."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from schemas.dataset.manifest import body_sha256
from schemas.names import index_path, manifest_path, shard_path
from service.proof.tally import DatasetTally
from service.proof.verify import VerifyReport, verify_dataset
from service.report.page import render_page
from tests.support.html_page import Node, read_page
from tests.support.plans import JOB, sample_id
from tests.support.reference_models import VOCAB_SIZE, TinyModel
from tests.support.shards import (
    Capture,
    ShardRow,
    capture,
    write_dataset,
    write_manifest,
    write_unit,
)

NOW = datetime(2025, 3, 1, 12, 30, tzinfo=UTC)
EVIL = "<script>document.title='owned'</script><img src=x onerror=alert(1)>"
OTHER_JOB = "j-00000000000000aa"


@pytest.fixture(scope="module")
def unit(tmp_path_factory) -> Capture:
    """One unit of a model whose vocabulary holds markup and a mark that turns text around."""
    model = TinyModel(tmp_path_factory.mktemp("model"), "llama", "bfloat16")
    words = {f"w{number} ": number for number in range(VOCAB_SIZE - 2)}
    words |= {EVIL: VOCAB_SIZE - 2, "\u202e": VOCAB_SIZE - 1}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0 "))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(model.folder)
    return capture(model, dtype="bfloat16")


@pytest.fixture
def made(unit, tmp_path) -> Path:
    write_dataset(tmp_path / "dataset", {0: unit})
    return tmp_path / "dataset"


@pytest.fixture
def rewrite(made, tmp_path, unit) -> Callable[[list[ShardRow]], None]:
    """Put other rows into the dataset's only unit, with index and manifest to match."""

    def change(rows: list[ShardRow]) -> None:
        write_unit(made, replace(unit, rows=rows), rows, 0)
        write_manifest(made, unit.provenance, {0: rows})

    return change


def pages(folder: Path, model_folder: Path | None = None) -> tuple[VerifyReport, str]:
    """Verify a dataset and return what was found, and its page."""
    tally = DatasetTally()
    report = verify_dataset(folder, model_folder=model_folder, tally=tally)
    return report, render_page(report, tally, model_folder, NOW)


def page(folder: Path, model_folder: Path | None = None) -> Node:
    return read_page(pages(folder, model_folder)[1])


@pytest.fixture(scope="module")
def right_page(unit, tmp_path_factory) -> Node:
    """The page of a right dataset, with the model's text."""
    scratch = tmp_path_factory.mktemp("right")
    write_dataset(scratch / "dataset", {0: unit})
    return page(scratch / "dataset", unit.model.folder)


def renamed(row: ShardRow, **changes: object) -> ShardRow:
    """Return a row with other contents under the name that they ask for."""
    other = replace(row, **changes)
    planned = slice(0, other.prompt_tokens)
    name = sample_id(other.source_id, other.input_ids[planned], other.loss_mask[planned])
    return replace(other, sample_id=name)


def edit(folder: Path, change: Callable[[dict], None]) -> None:
    """Change the manifest's document and sign it again."""
    path = folder / manifest_path(JOB)
    body = json.loads(path.read_text())
    change(body)
    path.write_text(json.dumps(body | {"sha256": body_sha256(body)}))


def second_job(folder: Path, scratch: Path) -> str:
    """Put a copy of the job into the dataset under another id, as if run a second time; return the id."""
    copy = scratch / "copy"
    shutil.copytree(folder, copy)
    for path in (shard_path, index_path):
        (folder / path(OTHER_JOB, 0)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(copy / path(JOB, 0), folder / path(OTHER_JOB, 0))
    text = (copy / manifest_path(JOB)).read_text().replace(JOB, OTHER_JOB)
    body = json.loads(text)
    (folder / manifest_path(OTHER_JOB)).write_text(json.dumps(body | {"sha256": body_sha256(body)}))
    return OTHER_JOB
