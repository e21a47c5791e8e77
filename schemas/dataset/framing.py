"""Parquet's frames around values that lie elsewhere: page headers, the page index and the footer. No I/O.

pyarrow's writer copies every value into a page of its own and puts it where it likes. With frames of our own
a layer goes from the pool's pages to the disk (O_DIRECT) as it lies, at an offset that the caller chooses.
The file holds what `pq.ParquetWriter` with `writer_options` would write, page by page the same bytes: one row
a row group, one data page (v1) a column chunk, PLAIN.

Sources, in the repository of the Parquet format: `parquet.thrift` for all structs, enums and their numbers,
`Encodings.md` for PLAIN and for runs of levels, `LogicalTypes.md` for lists, `PageIndex.md` for the order of
the page index.
"""

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import DTypeLike

from schemas.dataset.columns import MAX_VALUE_BYTES, writer_options
from schemas.dataset.thrift import (
    BOOLEAN,
    FALSE_ITEM,
    STOP,
    STRUCT,
    Value,
    binary,
    boolean,
    encoded_items,
    fields,
    i8,
    i16,
    i32,
    i64,
    items,
    record,
    struct,
    varint,
)

MAGIC = b"PAR1"
"""First and last in the file; the caller writes it at offset 0."""

_CREATED_BY = b"eagle-quarry version 1"
_FORMAT_VERSION = 2
_MAX_ORDINAL = 2**15 - 1

_DATA_PAGE = i32(0)
_PLAIN, _RLE = i32(0), i32(3)
_ENCODINGS = items([_RLE, _PLAIN])
_CODECS = {"none": i32(0), "zstd": i32(6)}
_REQUIRED, _OPTIONAL, _REPEATED = i32(0), i32(1), i32(2)
_NO_NULLS = _FIRST_ROW = i64(0)
_ASCENDING = i32(1)
_TYPE_ORDER = record({1: struct({})})
_INT32, _INT64, _BYTE_ARRAY = i32(1), i32(2), i32(6)
_LIST_GROUP = {6: i32(3), 10: struct({3: struct({})})}


@dataclass(frozen=True, slots=True)
class _Kind:
    """How Parquet holds an Arrow type; `numbers` is what PLAIN stores, None for bytes with a length.

    `schema` has the fields of SchemaElement that are the type's own.
    """

    physical: Value
    numbers: DTypeLike
    schema: Mapping[int, Value]


def _unsigned(bits: int, converted: int) -> dict[int, Value]:
    return {6: i32(converted), 10: struct({10: struct({1: i8(bits), 2: boolean(False)})})}


_KINDS: dict[pa.DataType, _Kind] = {
    pa.int32(): _Kind(_INT32, "<i4", {}),
    pa.uint8(): _Kind(_INT32, "<i4", _unsigned(8, 11)),
    pa.uint64(): _Kind(_INT64, "<u8", _unsigned(64, 14)),
    pa.string(): _Kind(_BYTE_ARRAY, None, {6: i32(0), 10: struct({1: struct({})})}),
    pa.large_binary(): _Kind(_BYTE_ARRAY, None, {}),
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
    by_reference: bool
    has_statistics: bool
    metadata: bytes


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A placed page, encoded as far as it can be before the place of the page index is known."""

    metadata: bytes
    column_index: bytes
    offset_index: bytes


class Framer:
    """Frames the rows of one file: `page` and `place` each column in turn, `end_row`, and in the end `tail`.

    Holds about 3 KB a row of twelve columns until then, and no page: a payload is free once it is written.
    """

    def __init__(self, schema: pa.Schema) -> None:
        """Take a shard's schema with its metadata; ValueError for a type that no shard has."""
        options = writer_options(schema)
        self._schema = schema
        self._columns = [_column(field, options) for field in schema]
        self._row: list[_Chunk] = []
        self._row_offset = self._row_bytes = self._row_uncompressed_bytes = 0
        self._groups: list[tuple[list[_Chunk], dict[int, Value]]] = []

    def page(self, column: int, array: pa.Array) -> Page:
        """Frame the one value of `array`, which has the column's type. Does not change the framer.

        The payload of an uncompressed large_binary is a view of the array's own buffer. ValueError if the
        array has not one value, has a null where none may be, or has more than `MAX_VALUE_BYTES` in it.
        """
        about = self._columns[column]
        if len(array) != 1 or array.type != about.type or (array.null_count and not about.nullable):
            raise ValueError(f"{about.name}: one {about.type} is due, not {len(array)} of {array.type}")
        num_values, front, raw = _plain(about, array)
        if raw.nbytes > MAX_VALUE_BYTES:
            raise ValueError(f"{about.name}: {raw.nbytes} bytes, and a value may have {MAX_VALUE_BYTES}")
        if about.kind.numbers is None and not array.null_count:
            front += raw.nbytes.to_bytes(4, "little")
        num_bytes = len(front) + raw.nbytes
        payload: memoryview | None = None
        if about.codec is not None:
            packed = about.codec.compress(b"".join((front, raw)))
            header = _page_header(num_bytes, packed.size, num_values)
            head = b"".join((header, packed))
        else:
            header = _page_header(num_bytes, num_bytes, num_values)
            head = header + front
            if about.by_reference:
                payload = raw
            else:
                head += raw
        bounds = bytes(raw) if about.has_statistics else None
        return Page(column, head, payload, len(header) + num_bytes, num_values, bounds)

    def place(self, page: Page, offset: int) -> None:
        """Note that `page` begins at byte `offset` of the file; ValueError out of the columns' order.

        There may be a gap before it, of any bytes.
        """
        about = self._columns[page.column]
        if page.column != len(self._row):
            raise ValueError(f"{about.name} is placed where column {len(self._row)} is due")
        num_bytes = page.num_bytes
        at = i64(offset)
        sizes = _sizes(page.num_values, page.uncompressed_bytes, num_bytes)
        metadata = about.metadata + sizes + fields({9: at}, after=7)
        column_index = b""
        if page.bounds is not None:
            metadata += fields({12: _statistics(page.bounds)}, after=9)
            column_index = _column_index(page.bounds)
        offset_index = _offset_index(at, num_bytes)
        if not self._row:
            self._row_offset = offset
        self._row.append(_Chunk(metadata + STOP, column_index, offset_index))
        self._row_bytes += num_bytes
        self._row_uncompressed_bytes += page.uncompressed_bytes

    def end_row(self) -> None:
        """Close the row group; ValueError if a column was not placed."""
        if len(self._row) != len(self._columns):
            raise ValueError(f"the row ends without {self._columns[len(self._row)].name}")
        about = {
            2: i64(self._row_uncompressed_bytes),
            3: i64(1),
            5: i64(self._row_offset),
            6: i64(self._row_bytes),
        }
        if len(self._groups) <= _MAX_ORDINAL:
            about[7] = i16(len(self._groups))
        self._groups.append((self._row, about))
        self._row = []
        self._row_bytes = self._row_uncompressed_bytes = 0

    def tail(self, offset: int) -> bytes:
        """Return the file's end from byte `offset`: page index, footer, its length and `MAGIC`.

        ValueError if a row is open.
        """
        if self._row:
            raise ValueError(f"the file ends in a row, of which {len(self._row)} columns are placed")
        chunks = [chunk for row, _ in self._groups for chunk in row]
        column_indexes = b"".join(chunk.column_index for chunk in chunks)
        column_at, offset_at = offset, offset + len(column_indexes)
        groups = []
        for row, totals in self._groups:
            placed = []
            for chunk in row:
                index, locations = len(chunk.column_index), len(chunk.offset_index)
                about = {2: i64(0), 3: (STRUCT, chunk.metadata), 4: i64(offset_at), 5: i32(locations)}
                if index:
                    about |= {6: i64(column_at), 7: i32(index)}
                placed.append(record(about))
                column_at, offset_at = column_at + index, offset_at + locations
            groups.append(record({1: encoded_items(STRUCT, placed), **totals}))
        footer = self._footer(groups)
        offset_indexes = b"".join(chunk.offset_index for chunk in chunks)
        return b"".join((column_indexes, offset_indexes, footer, len(footer).to_bytes(4, "little"), MAGIC))

    def _footer(self, groups: list[bytes]) -> bytes:
        """Return FileMetaData, with the Arrow schema where pyarrow looks for it."""
        arrow = base64.b64encode(self._schema.serialize())
        pairs = {**(self._schema.metadata or {}), b"ARROW:schema": arrow}
        return record(
            {
                1: i32(_FORMAT_VERSION),
                2: _schema_elements(self._schema),
                3: i64(len(groups)),
                4: encoded_items(STRUCT, groups),
                5: items([struct({1: binary(key), 2: binary(value)}) for key, value in pairs.items()]),
                6: binary(_CREATED_BY),
                7: encoded_items(STRUCT, [_TYPE_ORDER] * len(self._columns)),
            }
        )


def _column(field: pa.Field, options: Mapping[str, Any]) -> _Column:
    is_list = pa.types.is_list(field.type)
    path = [field.name, "list", "element"] if is_list else [field.name]
    kind = _kind(field)
    name = ".".join(path)
    codec = options["compression"][name]
    packer = None
    if codec != "none":
        packer = pa.Codec(codec, compression_level=options["compression_level"][name])
    names = items([binary(part.encode()) for part in path])
    return _Column(
        name=field.name,
        type=field.type,
        nullable=field.nullable,
        is_list=is_list,
        kind=kind,
        codec=packer,
        by_reference=packer is None and pa.types.is_large_binary(field.type),
        has_statistics=field.name in options["write_statistics"],
        metadata=fields({1: kind.physical, 2: _ENCODINGS, 3: names, 4: _CODECS[codec]}),
    )


def _kind(field: pa.Field) -> _Kind:
    nested = pa.types.is_list(field.type)
    leaf = field.type.value_field if nested else field
    kind = _KINDS.get(leaf.type)
    if kind is None or (nested and (field.nullable or leaf.nullable)) or (kind.numbers and field.nullable):
        raise ValueError(f"{field.name}: no shard has a column of {field}")
    return kind


def _plain(about: _Column, array: pa.Array) -> tuple[int, bytes, memoryview]:
    """Return a page's number of values, its levels, and its value's bytes without their length."""
    numbers = about.kind.numbers
    if numbers is not None:
        values = _value(array, array.values.to_numpy(), np.int32) if about.is_list else array.to_numpy()
        raw = values.astype(numbers, copy=False).view(np.uint8).data
        return max(1, len(values)), _list_levels(len(values)) if about.is_list else b"", raw
    levels = _sized(_run(1, int(not array.null_count))) if about.nullable else b""
    if array.null_count:
        return 1, levels, memoryview(b"")
    data = memoryview(array.buffers()[2]).cast("B")
    return 1, levels, _value(array, data, np.int64 if pa.types.is_large_binary(about.type) else np.int32)


def _value(array: pa.Array, values: Any, offset: type[np.signedinteger[Any]]) -> Any:  # noqa: ANN401
    """Return the part of `values` between the only two offsets of `array`."""
    width = np.dtype(offset).itemsize
    start, stop = np.frombuffer(array.buffers()[1], offset, 2, array.offset * width).tolist()
    return values[start:stop]


def _list_levels(num_elements: int) -> bytes:
    """Return the repetition and definition levels of one list: 0, 1, 1, ... and as many 1s.

    An empty list is one entry of level 0 in both. As from pyarrow, repetition levels are packed as bits, up
    to 15 of them; from 16 on the first eight are, and the others are a run.
    """
    if num_elements <= 1:
        return _sized(_run(1, 0)) + _sized(_run(1, num_elements))
    packed = num_elements if num_elements < 16 else 8
    groups = (packed + 7) // 8
    repetition = varint(groups << 1 | 1) + ((1 << packed) - 2).to_bytes(groups, "little")
    if packed < num_elements:
        repetition += _run(num_elements - packed, 1)
    return _sized(repetition) + _sized(_run(num_elements, 1))


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


@lru_cache(maxsize=256)
def _sizes(num_values: int, uncompressed_bytes: int, num_bytes: int) -> bytes:
    """Return the fields of ColumnMetaData that follow the column's own."""
    return fields({5: i64(num_values), 6: i64(uncompressed_bytes), 7: i64(num_bytes)}, after=4)


def _statistics(bounds: bytes) -> Value:
    """Return Statistics of one value."""
    bound, exact = binary(bounds), boolean(True)
    return struct({3: _NO_NULLS, 5: bound, 6: bound, 7: exact, 8: exact})


def _column_index(bounds: bytes) -> bytes:
    """Return the ColumnIndex of a chunk of one page without nulls."""
    bound = items([binary(bounds)])
    no_null_page = encoded_items(BOOLEAN, [FALSE_ITEM])
    return record({1: no_null_page, 2: bound, 3: bound, 4: _ASCENDING, 5: items([_NO_NULLS])})


def _offset_index(at: Value, num_bytes: int) -> bytes:
    """Return the OffsetIndex of a chunk of one page."""
    return record({1: items([struct({1: at, 2: i32(num_bytes), 3: _FIRST_ROW})])})


def _schema_elements(schema: pa.Schema) -> Value:
    """Return the schema's tree, depth first; a list is three levels deep."""
    elements = [{3: _REQUIRED, 4: binary(b"schema"), 5: i32(len(schema))}]
    for field in schema:
        kind, name = _kind(field), binary(field.name.encode())
        if pa.types.is_list(field.type):
            elements += [
                {3: _REQUIRED, 4: name, 5: i32(1), **_LIST_GROUP},
                {3: _REPEATED, 4: binary(b"list"), 5: i32(1)},
            ]
            name = binary(b"element")
        repetition = _OPTIONAL if field.nullable else _REQUIRED
        elements.append({1: kind.physical, 3: repetition, 4: name, **kind.schema})
    return items([struct(element) for element in elements])
