"""Parquet's frames around values that lie elsewhere: page headers and the footer. No I/O.

pyarrow's writer copies every value into a page of its own and puts it where it likes. With frames of our own
a layer goes from the pool's pages to the disk (O_DIRECT) as it lies, at an offset that the caller chooses:
one row a row group, one data page (v1) a column chunk, PLAIN. There is no page index, since a chunk is one
page; `sample_id` and `num_tokens` have statistics, by which a filter finds its row group.

Sources, in the repository of the Parquet format: `parquet.thrift` for all structs, enums and their numbers,
`Encodings.md` for PLAIN and for runs of levels, `LogicalTypes.md` for lists and for converted types.
"""

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import DTypeLike

from schemas.dataset.columns import MAX_VALUE_BYTES, WITH_STATISTICS, ZSTD_LEVEL, is_packed
from schemas.dataset.thrift import (
    STRUCT,
    Value,
    binary,
    fields,
    i32,
    i64,
    items,
    record,
    struct,
    values,
    varint,
)

MAGIC = b"PAR1"
"""First and last in the file; the caller writes it at offset 0."""

_CREATED_BY = b"eagle-quarry version 1"
_FORMAT_VERSION = 2

_DATA_PAGE = i32(0)
_PLAIN, _RLE = i32(0), i32(3)
_UNCOMPRESSED, _ZSTD = i32(0), i32(6)
_REQUIRED, _OPTIONAL, _REPEATED = i32(0), i32(1), i32(2)
_NO_NULLS = i64(0)
_TYPE_ORDER = record({1: struct({})})
"""Without it readers do not trust statistics."""
_INT32, _INT64, _BYTE_ARRAY = i32(1), i32(2), i32(6)
_UTF8, _LIST, _UINT_8, _UINT_64 = i32(0), i32(3), i32(11), i32(14)


@dataclass(frozen=True, slots=True)
class _Kind:
    """How Parquet holds an Arrow type; `numbers` is what PLAIN stores, None for bytes with a length."""

    physical: Value
    numbers: DTypeLike
    converted: Value | None = None


_KINDS: dict[pa.DataType, _Kind] = {
    pa.int32(): _Kind(_INT32, "<i4"),
    pa.uint8(): _Kind(_INT32, "<i4", _UINT_8),
    pa.uint64(): _Kind(_INT64, "<u8", _UINT_64),
    pa.string(): _Kind(_BYTE_ARRAY, None, _UTF8),
    pa.large_binary(): _Kind(_BYTE_ARRAY, None),
}


@dataclass(frozen=True, slots=True)
class Page:
    """One column chunk of one row: a single data page (v1). `head` + `payload` are its bytes in the file.

    `payload` (uint8) is the caller's own memory, and keeps it alive; all is in `head` where it is None.
    `uncompressed_bytes` counts the page's header in, as `num_bytes` does. `bounds` is the value as
    statistics hold it (least and greatest at once), None where the column has none.
    """

    column: int
    head: bytes
    payload: memoryview | None
    uncompressed_bytes: int
    num_values: int
    bounds: bytes | None

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        return len(self.head) + (0 if self.payload is None else self.payload.nbytes)


@dataclass(frozen=True, slots=True)
class _Column:
    """A leaf: what is the same of it in every row. `metadata` has the first four fields of ColumnMetaData."""

    name: str
    type: pa.DataType
    nullable: bool
    is_list: bool
    kind: _Kind
    codec: Any  # pa.Codec or None; pyarrow is untyped
    has_statistics: bool
    metadata: bytes


class Framer:
    """Frames the rows of one file: `page` and `place` each column in turn, `end_row`, and in the end `tail`.

    Holds about 2 KB a row of twelve columns until then, and no page: a payload is free once it is written.
    """

    def __init__(self, schema: pa.Schema) -> None:
        """Take a shard's schema with its metadata; ValueError for a type that no shard has."""
        self._schema = schema
        self._columns = [_column(field) for field in schema]
        self._row: list[bytes] = []
        self._row_uncompressed_bytes = 0
        self._groups: list[bytes] = []

    def page(self, column: int, array: pa.Array) -> Page:
        """Frame the one value of `array`, which has the column's type. Does not change the framer.

        The payload of an uncompressed large_binary is a view of the array's own buffer. ValueError if the
        array has not one value, has a null where none may be, or has more than `MAX_VALUE_BYTES` in it.
        """
        leaf = self._columns[column]
        if len(array) != 1 or array.type != leaf.type or (array.null_count and not leaf.nullable):
            raise ValueError(f"{leaf.name} takes one {leaf.type}, not {len(array)} of {array.type}")
        num_values, front, raw = _plain(leaf, array)
        if raw.nbytes > MAX_VALUE_BYTES:
            raise ValueError(f"{leaf.name}: {raw.nbytes} bytes, and a value may have {MAX_VALUE_BYTES}")
        if leaf.kind.numbers is None and not array.null_count:
            front += raw.nbytes.to_bytes(4, "little")
        num_bytes = len(front) + raw.nbytes
        payload: memoryview | None = None
        if leaf.codec is not None:
            packed = leaf.codec.compress(b"".join((front, raw)))
            header = _page_header(num_bytes, packed.size, num_values)
            head = b"".join((header, packed))
        else:
            header = _page_header(num_bytes, num_bytes, num_values)
            head = header + front
            if pa.types.is_large_binary(leaf.type):
                payload = raw
            else:
                head += raw
        bounds = bytes(raw) if leaf.has_statistics else None
        return Page(column, head, payload, len(header) + num_bytes, num_values, bounds)

    def place(self, page: Page, offset: int) -> None:
        """Note that `page` begins at byte `offset` of the file; ValueError out of the columns' order.

        There may be a gap before it, of any bytes.
        """
        leaf = self._columns[page.column]
        if page.column != len(self._row):
            raise ValueError(f"{leaf.name} is placed where column {len(self._row)} belongs")
        rest = {
            5: i64(page.num_values),
            6: i64(page.uncompressed_bytes),
            7: i64(page.num_bytes),
            9: i64(offset),
        }
        if page.bounds is not None:
            rest[12] = struct({3: _NO_NULLS, 5: binary(page.bounds), 6: binary(page.bounds)})
        metadata = leaf.metadata + fields(rest, after=4) + b"\0"
        self._row.append(record({2: i64(0), 3: (STRUCT, metadata)}))
        self._row_uncompressed_bytes += page.uncompressed_bytes

    def end_row(self) -> None:
        """Close the row group; ValueError if a column was not placed."""
        if len(self._row) != len(self._columns):
            raise ValueError(f"the row ends without {self._columns[len(self._row)].name}")
        chunks = items(STRUCT, self._row)
        self._groups.append(record({1: chunks, 2: i64(self._row_uncompressed_bytes), 3: i64(1)}))
        self._row = []
        self._row_uncompressed_bytes = 0

    def tail(self) -> bytes:
        """Return the file's end: footer, its length and `MAGIC`. ValueError if a row is open.

        The footer holds the Arrow schema where pyarrow looks for it.
        """
        if self._row:
            raise ValueError(f"the file ends in a row, of which {len(self._row)} columns are placed")
        arrow = base64.b64encode(self._schema.serialize())
        pairs = {**(self._schema.metadata or {}), b"ARROW:schema": arrow}
        footer = record(
            {
                1: i32(_FORMAT_VERSION),
                2: _schema_elements(self._schema),
                3: i64(len(self._groups)),
                4: items(STRUCT, self._groups),
                5: values([struct({1: binary(key), 2: binary(value)}) for key, value in pairs.items()]),
                6: binary(_CREATED_BY),
                7: items(STRUCT, [_TYPE_ORDER] * len(self._columns)),
            }
        )
        return b"".join((footer, len(footer).to_bytes(4, "little"), MAGIC))


def _column(field: pa.Field) -> _Column:
    is_list = pa.types.is_list(field.type)
    path = [field.name, "list", "element"] if is_list else [field.name]
    kind = _kind(field)
    codec = pa.Codec("zstd", compression_level=ZSTD_LEVEL) if is_packed(field) else None
    names = values([binary(part.encode()) for part in path])
    return _Column(
        name=field.name,
        type=field.type,
        nullable=field.nullable,
        is_list=is_list,
        kind=kind,
        codec=codec,
        has_statistics=field.name in WITH_STATISTICS,
        metadata=fields(
            {1: kind.physical, 2: values([_RLE, _PLAIN]), 3: names, 4: _ZSTD if codec else _UNCOMPRESSED}
        ),
    )


def _kind(field: pa.Field) -> _Kind:
    nested = pa.types.is_list(field.type)
    leaf = field.type.value_field if nested else field
    kind = _KINDS.get(leaf.type)
    if kind is None or (nested and (field.nullable or leaf.nullable)) or (kind.numbers and field.nullable):
        raise ValueError(f"{field.name}: no shard has a column of {field}")
    return kind


def _plain(leaf: _Column, array: pa.Array) -> tuple[int, bytes, memoryview]:
    """Return a page's number of values, its levels, and its value's bytes without their length."""
    numbers = leaf.kind.numbers
    if numbers is not None:
        elements = _value(array, array.values.to_numpy(), np.int32) if leaf.is_list else array.to_numpy()
        raw = elements.astype(numbers, copy=False).view(np.uint8).data
        return max(1, len(elements)), _list_levels(len(elements)) if leaf.is_list else b"", raw
    levels = _sized(_run(1, int(not array.null_count))) if leaf.nullable else b""
    if array.null_count:
        return 1, levels, memoryview(b"")
    data = memoryview(array.buffers()[2]).cast("B")
    return 1, levels, _value(array, data, np.int64 if pa.types.is_large_binary(leaf.type) else np.int32)


def _value(array: pa.Array, data: Any, offset: type[np.signedinteger[Any]]) -> Any:  # noqa: ANN401
    """Return the part of `data` between the only two offsets of `array`."""
    width = np.dtype(offset).itemsize
    start, stop = np.frombuffer(array.buffers()[1], offset, 2, array.offset * width).tolist()
    return data[start:stop]


def _list_levels(num_elements: int) -> bytes:
    """Return the repetition and definition levels of one list: 0, 1, 1, ... and as many 1s.

    An empty list is one entry of level 0 in both.
    """
    if not num_elements:
        return _sized(_run(1, 0)) * 2
    following = _run(num_elements - 1, 1) if num_elements > 1 else b""
    return _sized(_run(1, 0) + following) + _sized(_run(num_elements, 1))


def _run(length: int, level: int) -> bytes:
    """Return a run of one level, which is 0 or 1."""
    return varint(length << 1) + bytes((level,))


def _sized(levels: bytes) -> bytes:
    return len(levels).to_bytes(4, "little") + levels


@lru_cache(maxsize=256)  # a row's layers have one size, and its numbers are four bytes each
def _page_header(uncompressed_bytes: int, num_bytes: int, num_values: int) -> bytes:
    """Return a PageHeader, of 30 bytes at most, for sizes that leave it out."""
    data_page = struct({1: i32(num_values), 2: _PLAIN, 3: _RLE, 4: _RLE})
    return record({1: _DATA_PAGE, 2: i32(uncompressed_bytes), 3: i32(num_bytes), 5: data_page})


def _schema_elements(schema: pa.Schema) -> Value:
    """Return the schema's tree, depth first; a list is three levels deep."""
    elements: list[Mapping[int, Value]] = [{3: _REQUIRED, 4: binary(b"schema"), 5: i32(len(schema))}]
    for field in schema:
        kind, name = _kind(field), binary(field.name.encode())
        if pa.types.is_list(field.type):
            elements += [
                {3: _REQUIRED, 4: name, 5: i32(1), 6: _LIST},
                {3: _REPEATED, 4: binary(b"list"), 5: i32(1)},
            ]
            name = binary(b"element")
        repetition = _OPTIONAL if field.nullable else _REQUIRED
        element = {1: kind.physical, 3: repetition, 4: name}
        elements.append(element if kind.converted is None else element | {6: kind.converted})
    return values([struct(element) for element in elements])
