"""Rows of columnar files as JSON lines would hold them.

A struct column has every key that any row has, null where a row lacks it, at every depth; and `datasets`
stores objects of varying shape as JSON text. A template would render both into the prompt.
"""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from service.plan.sources.conversations import MEDIA, Read, json_object, read_row
from service.plan.sources.rows import RejectedError, RejectReason, RowReject

_TOKENS = frozenset({"token_ids", "input_ids", "loss_mask", "attention_mask"})
"""Long columns of plain numbers."""
_NO_VALUE = ValueError, OverflowError, LookupError
"""What Arrow raises for a cell that Python cannot represent."""


def read_batch(batch: pa.RecordBatch, labels: Sequence[str]) -> Iterator[Read]:
    """Read the rows of a batch; of one with a cell that Python cannot represent, reject only that row.

    Strings in Parquet may not be UTF-8, dates beyond Python's range, and time zones unknown here.
    """
    try:
        rows = batch.to_pylist()
    except _NO_VALUE as error:
        if batch.num_rows == 1:
            yield None, RowReject(RejectReason.INVALID_SAMPLE, f"cannot be read: {error}")
            return
        for number in range(batch.num_rows):
            yield from read_batch(batch.slice(number, 1), labels)
    else:
        yield from (read_columns(row, batch.schema, labels) for row in rows)


def read_columns(row: Mapping[str, Any], schema: pa.Schema | None, labels: Sequence[str]) -> Read:
    """Return what `read_row` returns of a row whose columns have these types, if they are known."""
    plain = dict(row)
    for name in [name for name in row if name not in _TOKENS]:
        try:
            plain[name] = _plain(row[name], None if schema is None else schema.field(name).type)
        except RejectedError as error:
            return None, error.reject
        except (ValueError, LookupError, RecursionError) as error:
            return None, RowReject(RejectReason.INVALID_SAMPLE, f"{name}: cannot be read: {error}")
    return read_row(plain, labels)


def most_media_bytes(parquet: pq.FileMetaData, columns: Collection[str]) -> int:
    """Return how many bytes those of the columns that hold images or the like take in a row group, at most.

    Arrow holds the whole group of a column to read a few of its rows.
    """
    media, most = MEDIA.intersection(columns), 0
    for number in range(parquet.num_row_groups if media else 0):
        group = parquet.row_group(number)
        chunks = [group.column(place) for place in range(group.num_columns)]
        held = [chunk for chunk in chunks if chunk.path_in_schema.partition(".")[0] in media]
        most = max(most, sum(chunk.total_uncompressed_size for chunk in held))
    return most


def name_twice(schema: pa.Schema, used: Collection[str], again: str) -> str | None:
    """Return a name that a file has twice: of a column in `used`, or of a member of a struct in one.

    `again` is what the file's reader has added to the name of a second column, if no column in `used` has it.
    """
    names = [field.name if field.name in used else field.name.removesuffix(again) for field in schema]
    if name := _repeated([name for name in names if name in used]):
        return name
    kinds = (field.type for field, name in zip(schema, names, strict=True) if name in used)
    return next(filter(None, map(_member_twice, kinds)), None)


@lru_cache
def _member_twice(kind: pa.DataType) -> str | None:
    fields = [kind.field(place) for place in range(kind.num_fields)]
    inside = (_member_twice(field.type) for field in fields)
    return _repeated([field.name for field in fields]) or next(filter(None, inside), None)


def _repeated(names: Sequence[str]) -> str | None:
    return next((name for name in names if names.count(name) > 1), None)


def _plain(value: Any, kind: pa.DataType | None) -> Any:  # noqa: ANN401 - whatever a column holds
    """Return a value without null members of structs, and with its JSON decoded.

    JSON keeps its nulls, and so does a map, which becomes an object.
    """
    if isinstance(kind, pa.JsonType):
        return json.loads(value, object_pairs_hook=json_object) if isinstance(value, str) else value
    if isinstance(value, Mapping):
        return {key: _plain(held, _member(kind, key)) for key, held in value.items() if held is not None}
    if isinstance(value, list):
        if isinstance(kind, pa.MapType):
            if pa.types.is_nested(kind.key_type):
                raise ValueError(f"a map has keys of type {kind.key_type}")
            return json_object([(key, _plain(held, kind.item_type)) for key, held in value])
        return [_plain(held, None if kind is None else _item(kind)) for held in value]
    return value


@lru_cache
def _member(kind: pa.DataType | None, key: str) -> pa.DataType | None:
    return kind.field(key).type if kind is not None and pa.types.is_struct(kind) else None


@lru_cache
def _item(kind: pa.DataType) -> pa.DataType | None:
    return getattr(kind, "value_type", None)
