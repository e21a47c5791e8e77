"""Known failures of files: of a sealed shard before it is committed, of a plan, and of a finished dataset."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from schemas.dataset.entries import FileEntry
from schemas.dataset.manifest import Manifest
from schemas.dataset.seal import sha256_of
from tests.support.parquet import writer_options

Row = dict[str, Any]


def flip_bit(path: Path, at: int) -> None:
    """Change one bit; a negative `at` counts from the end."""
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def page(path: Path, row: int, column: str) -> tuple[int, int]:
    """Return where a row's page begins, header included, and where it ends."""
    metadata = pq.read_metadata(path)
    names = [metadata.schema.column(index).path for index in range(metadata.num_columns)]
    index = next(place for place, name in enumerate(names) if name.split(".")[0] == column)
    chunk = metadata.row_group(row).column(index)
    return chunk.data_page_offset, chunk.data_page_offset + chunk.total_compressed_size


def flip_state(path: Path, row: int = 2) -> None:
    flip_bit(path, page(path, row, "layer_2")[1] - 100)


def flip_ids(path: Path, row: int = 2) -> None:
    flip_bit(path, page(path, row, "input_ids")[1] - 3)


def flip_page_header(path: Path, row: int = 2) -> None:
    flip_bit(path, page(path, row, "layer_2")[0] + 1)


def flip_footer(path: Path) -> None:
    length = int.from_bytes(path.read_bytes()[-8:-4], "little")
    flip_bit(path, -8 - length // 2)


def flip_middle(path: Path) -> None:
    flip_bit(path, path.stat().st_size // 2)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def rewrite(path: Path, change: Callable[[list[Row]], list[Row]]) -> list[Row]:
    """Write a shard anew with other rows, as the writer would have written them; return the rows."""
    schema = pq.read_schema(path)
    rows = change(pq.read_table(path).to_pylist())
    with pq.ParquetWriter(path, schema, **writer_options(schema)) as file:
        for row in rows:
            file.write_table(pa.Table.from_pylist([row], schema=schema), row_group_size=1)
    return rows


STATES = ("layer_2", "layer_4", "layer_8", "checksums")

Change = Callable[[list[Row], Sequence[int]], list[Row]]
"""Changes the rows of a shard; the places name rows of one length that no logits are sampled of."""


def exchange(*columns: str) -> Change:
    """Return a change that gives two rows each other's `columns`."""

    def change(rows: list[Row], free: Sequence[int]) -> list[Row]:
        one, other = free[:2]
        for column in columns:
            rows[one][column], rows[other][column] = rows[other][column], rows[one][column]
        return rows

    return change


def other_token(rows: list[Row], free: Sequence[int]) -> list[Row]:
    rows[free[0]]["input_ids"][3] += 1
    return rows


def other_flag(rows: list[Row], free: Sequence[int]) -> list[Row]:
    rows[free[0]]["loss_mask"][3] ^= 1
    return rows


def without_one(rows: list[Row], free: Sequence[int]) -> list[Row]:
    return [row for place, row in enumerate(rows) if place != free[0]]


def with_one_twice(rows: list[Row], free: Sequence[int]) -> list[Row]:
    return [*rows, rows[free[0]]]


def in_another_order(rows: list[Row], free: Sequence[int]) -> list[Row]:
    return rows[::-1]


def sign_again(dataset: Path) -> None:
    """Make the manifest right for the files as they are now, its own hash too."""
    (path,) = (dataset / "manifests").glob("*.json")
    manifest = Manifest.model_validate_json(path.read_text())

    def now(entry: FileEntry) -> FileEntry:
        digest, num_bytes = sha256_of(dataset / entry.path)
        return entry.model_copy(update={"sha256": digest, "bytes": num_bytes})

    update = {name: tuple(now(entry) for entry in getattr(manifest, name)) for name in ("shards", "indexes")}
    values = manifest.model_copy(update=update).model_dump(mode="json")
    values["totals"]["bytes"] = sum(entry.bytes for entry in update["shards"])
    del values["sha256"]
    path.write_text(Manifest.model_validate(values).model_dump_json(indent=1))


def write_rows(path: Path, rows: list[Row], schema: pa.Schema) -> None:
    """Write a light table anew."""
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), path)
