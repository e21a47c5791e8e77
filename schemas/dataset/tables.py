"""How small Parquet files are read whole: plans, indexes, token counts."""

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from schemas.dataset.columns import KEYED_PLAN_SCHEMA, PLAN_SCHEMA, labels_of, with_labels


def read_table(source: Path | pa.NativeFile, columns: Sequence[str] | None = None) -> pa.Table:
    """Read a file, or those of its columns that are named, in the calling thread.

    `pyarrow.parquet.read_table` leaves threads behind that abort a process which ends at that moment
    (apache/arrow#34314): the exit code of a command would then say nothing about the dataset.

    Raises:
        OSError: the file cannot be read.
        pa.ArrowException: it is not Parquet, or has no such column.
    """
    with pq.ParquetFile(source, pre_buffer=False) as file:
        names = file.schema_arrow.names
        for missing in sorted(set(columns or ()) - set(names)):
            raise pa.ArrowInvalid(f"it has no column {missing}")
        return file.read(columns=columns, use_threads=False)


def read_plan_table(source: Path | pa.NativeFile) -> pa.Table:
    """Read a unit's frozen samples, `PLAN_SCHEMA` or `KEYED_PLAN_SCHEMA`, with labels behind.

    Raises as `read_table` does, also for other columns.
    """
    table = read_table(source)
    labels = labels_of(table.schema)
    schemas = (with_labels(schema, labels) for schema in (PLAN_SCHEMA, KEYED_PLAN_SCHEMA))
    if not any(table.schema.equals(schema) for schema in schemas):
        raise pa.ArrowInvalid("its columns are not those of a plan")
    return table
