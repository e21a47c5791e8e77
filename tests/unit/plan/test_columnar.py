"""Calls and tools from columns render as those from lines of JSON: keys that a row never had stay away."""

import os
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from schemas.source import Sample
from service.errors import SourceRefused
from service.plan.sources import RejectReason, RowReject
from service.plan.sources.columnar import name_twice
from service.plan.sources.conversations import read_row
from tests.support.fake_hub import FakeHub
from tests.unit.plan.test_hub_sources import rows
from tests.unit.plan.test_sources import ANSWER, ASK, jsonl, opened, parquet, rows_of, turns


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def call(name: str, **arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


CALLED = [
    {"messages": [ASK, call("weather", city="Bern")], "tools": [tool("weather", city={"type": "string"})]},
    {
        "messages": [ASK, call("add", x=1, y=2)],
        "tools": [tool("add", x={"type": "integer"}, y={"minimum": 0})],
    },
    {"messages": [ASK, ANSWER]},
]


def of_datasets(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Write them as `datasets` does what it has read of JSON lines: what varies by row is text of JSON."""
    lines = str(jsonl(path.with_suffix(".jsonl"), *rows))
    read = datasets.load_dataset(
        "json", data_files=lines, split="train", cache_dir=str(path.parent / "cache")
    )
    read.to_parquet(path)
    assert any("json" in str(kind) for kind in read.features.arrow_schema.types)
    return path


@pytest.mark.parametrize("write", [parquet, of_datasets])
def test_columns_give_the_calls_and_tools_that_lines_give(
    tmp_path: Path, write: Callable[[Path, list[dict[str, Any]]], Path]
) -> None:
    expected = rows_of(tmp_path, jsonl(tmp_path / "lines.jsonl", *CALLED))
    read = rows_of(tmp_path, write(tmp_path / "columns.parquet", CALLED))
    assert [row.content for row in read] == [row.content for row in expected]
    assert isinstance(read[0].content, Sample) and read[0].content.tools == (CALLED[0]["tools"][0],)


def test_text_and_ids_that_are_json_are_those_of_the_lines(tmp_path: Path) -> None:
    """What varies by row is JSON in any column: a text beside lists of parts, an id beside numbers."""
    texts = [{"id": "a", "text": "x"}, {"id": 2, "text": [{"type": "text", "text": "y"}]}]
    expected = rows_of(tmp_path, jsonl(tmp_path / "lines.jsonl", *texts))
    assert rows_of(tmp_path, of_datasets(tmp_path / "columns.parquet", texts)) == expected


def test_a_map_is_an_object_that_keeps_its_nulls(tmp_path: Path) -> None:
    expected = read_row(CALLED[0] | {"tools": [{"name": "weather", "default": None}]})[1]
    arguments = pa.map_(pa.string(), pa.string())
    function = pa.struct({"name": pa.string(), "arguments": arguments})
    calls = pa.list_(pa.struct({"type": pa.string(), "function": function}))
    message = pa.struct({"role": pa.string(), "content": pa.string(), "tool_calls": calls})
    columns = {
        "messages": pa.array([CALLED[0]["messages"]], pa.list_(message)),
        "tools": pa.array([[{"name": "weather", "default": None}]], pa.list_(arguments)),
    }
    pq.write_table(pa.table(columns), tmp_path / "columns.parquet")
    [row] = rows_of(tmp_path, "columns.parquet")
    assert row.content == expected


def test_a_column_of_objects_with_a_key_twice_rejects_the_row(tmp_path: Path) -> None:
    """Either may be meant, as in a line of JSON."""
    chat = [[[("role", "user"), ("content", "x"), ("content", "y")]]]
    for messages in (
        pa.array(['[{"role": "user", "content": "x", "content": "y"}]'], pa.json_()),
        pa.array(chat, pa.list_(pa.map_(pa.string(), pa.string()))),
    ):
        pq.write_table(pa.table({"messages": messages}), tmp_path / "columns.parquet")
        [row] = rows_of(tmp_path, "columns.parquet")
        assert row.content == RowReject(RejectReason.INVALID_SAMPLE, "an object has several 'content'")


@pytest.mark.parametrize(
    ("column", "kind", "key"),
    [
        ("messages", pa.struct({"a": pa.int64()}), {"a": 1}),
        ("text", pa.list_(pa.int64()), [1]),
        ("when", pa.date32(), date(2026, 1, 1)),
    ],
)
def test_a_map_that_no_object_can_hold_rejects_the_row(
    tmp_path: Path, column: str, kind: pa.DataType, key: object
) -> None:
    maps = pa.array([[(key, "x")]], pa.map_(kind, pa.string()))
    pq.write_table(pa.table({"text": ["x"]} | {column: maps}), tmp_path / "columns.parquet")
    source = {"kind": "file", "path": "columns.parquet"}
    [row] = opened(tmp_path, source, labels=("when",)).rows()
    assert isinstance(row.content, RowReject) and row.content.reason is RejectReason.INVALID_SAMPLE


def test_columns_of_a_dataset_on_the_hub_give_them_too(hub: FakeHub, tmp_path: Path) -> None:
    expected = [row.content for row in rows_of(tmp_path, jsonl(tmp_path / "lines.jsonl", *CALLED))]
    files = {"train.parquet": of_datasets(tmp_path / "columns.parquet", CALLED).read_bytes()}
    assert [row.content for row in rows(hub, files)] == expected


@pytest.mark.parametrize(
    ("names", "used", "twice"),
    [
        (["m-4", "m-4.1"], {"m-4", "m-4.1"}, None),
        (["m-4", "m-4.1"], {"m-4.1"}, None),
        (["m-4", "m-4.1"], {"m-4"}, "m-4"),  # as `pandas` reads a second m-4
        (["m-4", "m-4.1", "m-4.2"], {"m-4", "m-4.2"}, "m-4"),
    ],
)
def test_a_column_that_is_asked_for_is_no_second_one_of_another_name(
    names: list[str], used: set[str], twice: str | None
) -> None:
    assert name_twice(pa.schema([(name, pa.int64()) for name in names]), used, ".1") == twice


def test_a_parquet_row_with_an_image_is_a_reject(tmp_path: Path) -> None:
    images = ([{"bytes": b"\x89PNG", "path": None}], [], None)
    held = [{"messages": [ASK, ANSWER], "images": image} for image in images]
    read = [row.content for row in rows_of(tmp_path, parquet(tmp_path / "a.parquet", held))]
    assert isinstance(read[0], RowReject) and "'images' cannot be captured" in read[0].detail
    assert [turns(content) for content in read[1:]] == [[ASK, ANSWER]] * 2


def test_images_that_would_not_fit_in_memory_are_refused_by_their_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To read some of a column's rows takes the bytes of a whole row group."""
    monkeypatch.setattr("service.plan.sources.files.MAX_LINE_BYTES", 1000)
    held = [{"messages": [ASK, ANSWER], "image": {"bytes": os.urandom(600)}} for _ in range(2)]
    source = {"kind": "file", "path": parquet(tmp_path / "a.parquet", held).name}
    with pytest.raises(SourceRefused, match=r"'a.parquet' holds \d{4} bytes of images") as refused:
        list(opened(tmp_path, source).rows())
    assert refused.value.field == "source.path"
    captions = [{"text": "a", "image": row["image"]} for row in held]
    assert rows_of(tmp_path, parquet(tmp_path / "b.parquet", captions))[1].content == Sample(text="a")
