"""Datasets made to end the process that reads them: `quarry verify` names the file, and reads the rest."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from schemas.dataset.seal import sha256_of
from schemas.names import index_path, token_freq_path
from service.artifacts.dataset_files import repository_of
from service.cli import verify_process
from service.cli.verify_process import repository_named
from service.errors import OptionRefused
from tests.support.plans import JOB
from tests.support.reference_models import TinyModel
from tests.support.shards import capture, write_dataset
from tests.unit.cli.conftest import Run
from tests.unit.proof.made_dataset import SHARD, Dataset, make_it_end_its_process


@pytest.fixture
def dataset(tmp_path: Path, model: TinyModel) -> Dataset:
    units = {unit: capture(model, dtype="bfloat16", unit=unit) for unit in range(2)}
    write_dataset(tmp_path / "dataset", units)
    return Dataset(tmp_path / "dataset", units)


def sign(dataset: Dataset, path: str) -> None:
    """Let the manifest say of a file what it is now."""
    digest, num_bytes = sha256_of(dataset.folder / path)

    def change(body: dict[str, Any]) -> None:
        entries = [*body["shards"], *body["indexes"], *body["extras"]]
        (entry,) = (entry for entry in entries if entry["path"] == path)
        body["totals"]["bytes"] += num_bytes - entry["bytes"] if entry in body["shards"] else 0
        entry.update(sha256=digest, bytes=num_bytes)

    dataset.edit_manifest(change)


def findings(run: Run, dataset: Dataset) -> dict[str, str]:
    ran = run("verify", dataset.folder, "--json")
    report = json.loads(ran.out)
    assert (ran.code, report["ok"], ran.err) == (1, False, "")
    return {finding["path"]: finding["what"] for finding in report["findings"]}


@pytest.mark.slow
def test_a_file_that_ends_its_process_is_broken_and_the_rest_is_read(run: Run, dataset: Dataset) -> None:
    make_it_end_its_process(dataset.folder / SHARD)
    sign(dataset, SHARD)
    counts = token_freq_path(JOB)
    assert findings(run, dataset) == {SHARD: "ended the process that read it (SIGABRT)"}
    (dataset.folder / counts).write_bytes(b"")
    assert findings(run, dataset).keys() == {SHARD, counts}


def test_reading_is_given_up_over_many_of_them(
    run: Run, dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify_process, "MOST_ENDED", 0)
    make_it_end_its_process(dataset.folder / SHARD)
    sign(dataset, SHARD)
    ran = run("verify", dataset.folder)
    assert (ran.code, ran.out) == (1, "")
    assert f"1 files ended the process that read them: {SHARD}" in ran.err


@pytest.mark.slow
def test_what_decodes_to_more_than_the_bound_is_broken(
    run: Run, dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few enough values that the footer is believed, and a file of some kB."""
    index = dataset.folder / index_path(JOB, 0)
    table = pq.read_table(index)
    field = table.schema.field("input_ids")
    offsets = pa.array([0, *[2**25] * len(table)], pa.int32())
    ids = pa.ListArray.from_arrays(offsets, pa.array(np.zeros(2**25, np.int32)), type=field.type)
    place = table.schema.get_field_index("input_ids")
    pq.write_table(table.set_column(place, field, ids), index, compression="zstd")
    sign(dataset, index_path(JOB, 0))
    monkeypatch.setenv("QUARRY_READ_MEMORY_BYTES", str(2**26))
    # Mimalloc takes a gigabyte at once.
    monkeypatch.setenv("ARROW_DEFAULT_MEMORY_POOL", "system")
    found = findings(run, dataset)
    assert found == {index_path(JOB, 0): "cannot be read in the memory that may be taken for it"}


@pytest.mark.slow
def test_a_file_that_takes_forever_is_broken_and_the_rest_is_read(
    run: Run, dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """4 TB to hash, none of which is on the disk."""
    os.truncate(dataset.folder / SHARD, 2**42)

    def change(body: dict[str, Any]) -> None:
        (entry,) = (entry for entry in body["shards"] if entry["path"] == SHARD)
        body["totals"]["bytes"] += 2**42 - entry["bytes"]
        entry["bytes"] = 2**42

    dataset.edit_manifest(change)
    monkeypatch.setenv("QUARRY_PLAN_SILENCE_S", "6")
    assert findings(run, dataset) == {SHARD: "was read for 6 s without its next block or row"}


def end_at_once(*_: object) -> None:
    os._exit(9)


@pytest.mark.slow
def test_a_process_that_ends_before_it_reads_is_no_verdict(
    run: Run, dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify_process, "_serve", end_at_once)
    ran = run("verify", dataset.folder)
    assert ran.code == 3 and "ended with exit code 9" in ran.err


@pytest.mark.slow
def test_a_text_that_every_row_repeats_is_broken_beyond_the_bound(
    run: Run, dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """8 MB of text, once in a file of some kB and 100,000 times in its rows: 800 GB."""
    index, num_rows = dataset.folder / index_path(JOB, 0), 100_000
    first = pq.read_table(index).slice(0, 1)
    table = pa.concat_tables([first] * num_rows).combine_chunks()
    text = pa.DictionaryArray.from_arrays(pa.array(np.zeros(num_rows, np.int32)), ["a" * 8_000_000])
    place = table.schema.get_field_index("shard")
    table = table.set_column(place, pa.field("shard", text.type, nullable=False), text)
    pq.write_table(table, index, compression="zstd", store_schema=False, dictionary_pagesize_limit=2**30)
    sign(dataset, index_path(JOB, 0))
    monkeypatch.setenv("QUARRY_READ_MEMORY_BYTES", str(2**28))
    monkeypatch.setenv("ARROW_DEFAULT_MEMORY_POOL", "system")
    found = findings(run, dataset)
    assert found.keys() == {index_path(JOB, 0)} and "read" in found[index_path(JOB, 0)]


def test_a_repository_may_be_named_as_in_other_commands() -> None:
    for name in ("org/states", "hf://datasets/org/states", "hf://datasets/org/states/"):
        assert repository_named(name) == repository_of(name) == "org/states"
    for name in ("states", "./states", "hf://datasets/states", "https://huggingface.co/datasets/org/states"):
        with pytest.raises(OptionRefused, match=f"there is no folder {name}"):
            repository_named(name)
