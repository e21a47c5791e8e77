"""Rows are found where they are, however many chunks the index comes in and however many tokens it holds."""

import pickle
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from schemas.dataset.columns import INDEX_SCHEMA
from schemas.dataset.entries import FileEntry
from service.artifacts.dataset_files import LocalFiles
from service.reader import places
from service.reader.errors import ReaderError
from service.reader.places import read_places
from tests.support.shards import entry_of

LENGTHS = {
    "index/j-0/train-00000.parquet": (3, 1, 7, 2, 5),
    "index/j-0/train-00001.parquet": (4,),
    "index/j-1/train-00000.parquet": (0, 6, 2, 9),
}


def named(folder: Path, paths: Iterable[str]) -> list[FileEntry]:
    """Return what a manifest says of these files."""
    return [entry_of(folder, path) for path in paths]


LIGHT = ("sample_id", "source_id", "prompt_tokens")


def index_row(path: str, row: int, num_tokens: int) -> dict[str, Any]:
    """Return a row of an index, other than every other."""
    ids = [(7 * number + 3 * row + len(path) + num_tokens) % 11 for number in range(num_tokens)]
    return {
        "sample_id": f"{path}:{row}",
        "source_id": f"row {row}" if row % 2 else None,
        "num_tokens": num_tokens,
        "prompt_tokens": num_tokens // 2,
        "supervised_tokens": num_tokens,
        "input_ids": ids,
        "loss_mask": [token % 2 for token in ids],
        "shard": path.replace("index", "data"),
        "row": row,
        "top_tokens": None,
        "top_logprobs": None,
    }


@pytest.fixture
def rows() -> list[dict[str, Any]]:
    return [index_row(path, row, T) for path, lengths in LENGTHS.items() for row, T in enumerate(lengths)]


@pytest.fixture
def folder(tmp_path: Path, rows: list[dict[str, Any]]) -> Path:
    """Return a dataset's light files: two jobs, three indexes, row groups of two rows."""
    for path in LENGTHS:
        mine = [row for row in rows if row["shard"] == path.replace("index", "data")]
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.Table.from_pylist(mine, schema=INDEX_SCHEMA), tmp_path / path, row_group_size=2)
    return tmp_path


@pytest.mark.parametrize("again", [lambda found: found, lambda found: pickle.loads(pickle.dumps(found))])
def test_every_row_is_right_on_both_sides_of_every_border_between_chunks(folder, rows, again):
    found = again(read_places(LocalFiles(folder), named(folder, LENGTHS)))
    assert len(found) == len(rows)
    assert found.num_tokens == [row["num_tokens"] for row in rows]
    assert found.table["sample_id"].to_pylist() == [row["sample_id"] for row in rows]
    assert found.shards == [row["shard"] for row in rows]
    assert found.rows == [row["row"] for row in rows]
    for number, row in enumerate(rows):
        assert found.light(number) == {name: row[name] for name in LIGHT}
        ids, mask = found.tokens(number)
        assert (ids.tolist(), mask.tolist()) == (row["input_ids"], row["loss_mask"])


def test_supervised_tokens_are_counted_over_all_chunks(folder, rows):
    pairs = [pair for row in rows for pair in zip(row["input_ids"], row["loss_mask"], strict=True)]
    due = Counter(token for token, supervised in pairs if supervised)
    assert read_places(LocalFiles(folder), named(folder, LENGTHS)).supervised_counts() == due


def lists(lengths: list[int], values: np.ndarray) -> pa.Array:
    """Return lists of these lengths, whose values lie where they lie."""
    offsets = pa.array(np.cumsum([0, *lengths]), pa.int32())
    kind = pa.from_numpy_dtype(values.dtype)
    in_place = pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(values)])
    return pa.ListArray.from_arrays(offsets, in_place)


def index_of(lengths: list[int], ids: np.ndarray, mask: np.ndarray) -> pa.Table:
    every = list(range(len(lengths)))
    columns = {name: pa.array(every, pa.int32()) for name in ("prompt_tokens", "row")}
    columns["num_tokens"] = pa.array(lengths, pa.int32())
    texts = {name: pa.array(map(str, every)) for name in ("sample_id", "source_id", "shard")}
    every_column = columns | texts | {"input_ids": lists(lengths, ids), "loss_mask": lists(lengths, mask)}
    return pa.table(every_column, schema=pa.schema([INDEX_SCHEMA.field(name) for name in every_column]))


def test_a_dataset_may_hold_more_tokens_than_32_bits_count(tmp_path, monkeypatch):
    """Nine indexes of 2^28 tokens, which all lie in the same memory that nobody touches; one small one."""
    many = 2**28
    huge = index_of([many], np.zeros(many, np.int32), np.zeros(many, np.uint8))
    small = index_of([2, 3], np.arange(5, dtype=np.int32), np.array([0, 1, 1, 0, 1], np.uint8))
    paths = [f"index/j-0/train-{unit:05d}.parquet" for unit in range(10)]
    for path in paths:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    (tmp_path / paths[-1]).write_bytes(b"small")
    tables = {0: huge, len(b"small"): small}
    monkeypatch.setattr(places, "read_table", lambda file, columns: tables[file.size()].select(columns))
    found = read_places(LocalFiles(tmp_path), named(tmp_path, paths))
    assert len(found) == 11
    assert [[part.tolist() for part in found.tokens(number)] for number in (9, 10)] == [
        [[0, 1], [0, 1]],
        [[2, 3, 4], [1, 0, 1]],
    ]


def test_indexes_that_do_not_fit_together_are_refused(folder):
    path = folder / "index/j-1/train-00000.parquet"
    table = pq.read_table(path)
    place = table.schema.get_field_index("row")
    pq.write_table(table.set_column(place, "row", table["row"].cast(pa.string())), path)
    with pytest.raises(ReaderError, match=r"train-00000\.parquet: its columns are not those of an index"):
        read_places(LocalFiles(folder), named(folder, LENGTHS))


@pytest.mark.parametrize("path", ["../private/a.parquet", "/private/a.parquet", "data/../../a", "a\0b"])
def test_an_index_that_lies_outside_the_dataset_is_refused_before_it_is_opened(folder: Path, path: str):
    """The reader, and the export with it, open what a manifest names."""
    with pytest.raises(ReaderError, match="leaves the dataset"):
        read_places(LocalFiles(folder), [FileEntry(path=path, sha256="", bytes=0)])
