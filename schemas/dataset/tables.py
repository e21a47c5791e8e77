"""Writes and reads whole small Parquet files: plans, indexes, token counts."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from schemas.dataset.columns import labels_of, plan_schema, with_labels

MOST_SMALL, MOST_PER_BYTE = 2**26, 2000
"""The number of values that a file may always have, and the maximum per byte above that: samples of one token
repeated thousands of times are rare.
"""


def table_bytes(table: pa.Table, **options: Any) -> bytes:  # noqa: ANN401 - of an untyped function
    """Return a file's content, compressed with zstd; `options` go to `pyarrow.parquet.write_table`."""
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd", **options)
    content: bytes = sink.getvalue().to_pybytes()
    return content


def read_table(source: Path | str | pa.NativeFile, columns: Sequence[str] | None = None) -> pa.Table:
    """Read a file, or only the named columns, in the calling thread.

    `pyarrow.parquet.read_table` leaves threads behind that abort a process if it exits at that moment
    (apache/arrow#34314): a command's exit code would then say nothing about the dataset.

    Raises:
        OSError: the file cannot be read.
        pa.ArrowException: it is not Parquet, or has no such column.
    """
    try:
        with pq.ParquetFile(source, pre_buffer=False) as file:
            _check_size(file, source)
            names = file.schema_arrow.names
            for missing in sorted(set(columns or ()) - set(names)):
                raise pa.ArrowInvalid(f"it has no column {missing}")
            return file.read(columns=columns, use_threads=False)
    except UnicodeDecodeError as error:
        raise pa.ArrowInvalid(f"a name in it is not UTF-8: {error}") from error


def _check_size(file: pq.ParquetFile, source: Path | str | pa.NativeFile) -> None:
    """Raise ArrowInvalid if a footer names far more values than a file of its size can hold."""
    metadata = file.metadata
    num_values = 0
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        num_values += sum(group.column(column).num_values for column in range(group.num_columns))
    num_bytes = source.size() if isinstance(source, pa.NativeFile) else os.stat(source).st_size  # noqa: PTH116
    if num_values > max(MOST_SMALL, num_bytes * MOST_PER_BYTE):
        raise pa.ArrowInvalid(f"{num_bytes} bytes name {num_values} values, more than such a file can hold")


def read_plan_table(source: Path | str | pa.NativeFile) -> pa.Table:
    """Read a unit's frozen samples, whose schema is a `plan_schema` followed by labels.

    Raises as `read_table` does, also if the columns differ.
    """
    table = read_table(source)
    names = frozenset(table.schema.names)
    schema = plan_schema(hashed="content_hash" in names, in_dialogues="document" in names)
    if not table.schema.equals(with_labels(schema, labels_of(table.schema))):
        raise pa.ArrowInvalid("its columns are not those of a plan")
    return table
