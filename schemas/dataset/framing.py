"""Writes a shard: Parquet's page headers and footer around values in the caller's memory.

pyarrow's writer copies every value into a page of its own and chooses the offset. With our own framing, a
layer is written from the pool's pages to the disk (O_DIRECT) without a copy, at a chosen offset: one row per
row group, one data page (v1) per column chunk, PLAIN. There is no page index, since a chunk is one page;
`sample_id` and `num_tokens` have statistics, with which filters find row groups.

Sources, in the repository of the Parquet format: `parquet.thrift` for all structs, enums and their numbers,
`Encodings.md` for PLAIN and for runs of levels, `LogicalTypes.md` for lists and for converted types.
"""

import base64
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash
from numpy.typing import DTypeLike, NDArray

from schemas.dataset.columns import MAX_VALUE_BYTES, WITH_STATISTICS, ZSTD_LEVEL, is_packed
from schemas.dataset.direct import DirectWriter
from schemas.dataset.memory import scratch
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
"""The first and last bytes of the file."""

ALIGNED_BYTES = 2**18
"""A layer of at least this size begins on a block boundary, which makes the file at most 1.6 % larger. A
shorter one is copied.
"""

_CREATED_BY = b"eagle-quarry version 1"
_FORMAT_VERSION = 2

_DATA_PAGE = i32(0)
_PLAIN, _RLE = i32(0), i32(3)
_UNCOMPRESSED, _ZSTD = i32(0), i32(6)
_REQUIRED, _OPTIONAL, _REPEATED = i32(0), i32(1), i32(2)
_NO_NULLS = i64(0)
_TYPE_ORDER = record({1: struct({})})
"""Without this, readers do not trust statistics."""
_INT32, _INT64, _BYTE_ARRAY = i32(1), i32(2), i32(6)
_UTF8, _LIST, _UINT_8, _UINT_64 = i32(0), i32(3), i32(11), i32(14)


@dataclass(frozen=True, slots=True)
class _Kind:
    """How Parquet stores an Arrow type; `numbers` is PLAIN's number type, None for length-prefixed bytes."""

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

Cell = str | int | NDArray[Any] | None
"""A column's value in one row: lists of numbers and a layer's bytes are one-dimensional arrays."""


@dataclass(frozen=True, slots=True)
class _Column:
    """A leaf column: what is the same in every row. `metadata` has ColumnMetaData's first four fields."""

    name: str
    kind: _Kind
    nullable: bool
    is_list: bool
    in_place: bool
    """Written without a copy, with O_DIRECT."""
    codec: Any  # pa.Codec or None; pyarrow is untyped
    metadata: bytes


@dataclass(frozen=True, slots=True)
class Page:
    """A cell as stored, `head` and `payload`; `num_bytes` is their length before compression."""

    num_values: int
    num_bytes: int
    head: bytes
    payload: memoryview


class ShardFile:
    """A shard being written: call `write_row` for each row, then `end`.

    Until then it holds about 2 KB per row of twelve columns, and no values: their memory is free once
    written.
    """

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        """Create or empty the file; `schema` is a shard's, with metadata.

        Raises OSError; KeyError for a type that no shard has.
        """
        self._schema = schema
        self._columns = _columns(schema)
        self._groups: list[bytes] = []
        self._file = DirectWriter(path)
        self._file.write(MAGIC)

    def write_row(self, row: Iterable[Page]) -> None:
        """Append a row group with a page for each column; each is written before the next is requested.

        Raises OSError; ValueError if the number of pages is not that of the columns. The file is unusable
        after either.
        """
        chunks: list[bytes] = []
        row_bytes = 0
        for column, page in zip(self._columns, row, strict=True):
            if column.in_place and page.payload.nbytes >= ALIGNED_BYTES:
                self._file.pad(len(page.head))
            offset = self._file.position
            self._file.write(page.head)
            self._file.write(page.payload)
            chunk = {
                5: i64(page.num_values),
                6: i64(page.num_bytes),
                7: i64(self._file.position - offset),
                9: i64(offset),
            }
            if column.name in WITH_STATISTICS:
                raw = binary(bytes(page.payload))
                chunk[12] = struct({3: _NO_NULLS, 5: raw, 6: raw})
            metadata = column.metadata + fields(chunk, after=4) + b"\0"
            chunks.append(record({2: i64(0), 3: (STRUCT, metadata)}))
            row_bytes += page.num_bytes
        self._groups.append(record({1: items(STRUCT, chunks), 2: i64(row_bytes), 3: i64(1)}))

    def end(self) -> tuple[str, str, int]:
        """Write the footer and close the file. Not durable before it is sealed. Raises OSError.

        Returns the xxh3_128 of the file and of its footer with length and magic, and the file's length.
        """
        tail = self._tail()
        self._file.write(tail)
        return self._file.end(), xxhash.xxh3_128_hexdigest(tail), self._file.position

    def close(self) -> None:
        """Close the file as it is; safe to call twice."""
        self._file.close()

    def _tail(self) -> bytes:
        # pyarrow reads the Arrow schema from here.
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


def pages(schema: pa.Schema, cells: Iterable[Cell]) -> Iterator[Page]:
    """Yield the pages of a row's cells, which another thread than the writer's may make in advance.

    An uncompressed page is a view of its cell. Raises ValueError if the number of cells is not that of the
    columns, or if one has more than `MAX_VALUE_BYTES`.
    """
    for column, cell in zip(_columns(schema), cells, strict=True):
        yield _page(column, cell)


@lru_cache(maxsize=16)
def _columns(schema: pa.Schema) -> tuple[_Column, ...]:
    return tuple(_column(field) for field in schema)


def _page(column: _Column, cell: Cell) -> Page:
    num_values, front, raw = _plain(column, cell)
    if raw.nbytes > MAX_VALUE_BYTES:
        raise ValueError(f"{column.name}: {raw.nbytes} bytes; a value has at most {MAX_VALUE_BYTES}")
    page_bytes = len(front) + raw.nbytes
    if column.codec is None:
        header = _page_header(page_bytes, page_bytes, num_values)
        return Page(num_values, len(header) + page_bytes, header + front, raw)
    whole = scratch("page", page_bytes)
    whole[: len(front)], whole[len(front) :] = np.frombuffer(front, np.uint8), np.frombuffer(raw, np.uint8)
    payload = memoryview(column.codec.compress(whole, asbytes=True))
    header = _page_header(page_bytes, payload.nbytes, num_values)
    return Page(num_values, len(header) + page_bytes, header, payload)


def _column(field: pa.Field) -> _Column:
    is_list = pa.types.is_list(field.type)
    path = [field.name, "list", "element"] if is_list else [field.name]
    kind = _kind(field)
    codec = pa.Codec("zstd", compression_level=ZSTD_LEVEL) if is_packed(field) else None
    metadata = {
        1: kind.physical,
        2: values([_RLE, _PLAIN]),
        3: values([binary(part.encode()) for part in path]),
        4: _ZSTD if codec else _UNCOMPRESSED,
    }
    in_place = codec is None and pa.types.is_large_binary(field.type)
    return _Column(field.name, kind, field.nullable, is_list, in_place, codec, fields(metadata))


def _kind(field: pa.Field) -> _Kind:
    return _KINDS[field.type.value_type if pa.types.is_list(field.type) else field.type]


def _plain(column: _Column, cell: Cell) -> tuple[int, bytes, memoryview]:
    """Return a page's number of values, the bytes before the value, and the value's bytes."""
    numbers = column.kind.numbers
    if numbers is not None:
        elements = np.atleast_1d(np.asarray(cell)).astype(numbers, copy=False)
        levels = _list_levels(len(elements)) if column.is_list else b""
        return max(1, len(elements)), levels, elements.view(np.uint8).data
    levels = _sized(_run(1, int(cell is not None))) if column.nullable else b""
    if cell is None:
        return 1, levels, memoryview(b"")
    raw = memoryview(cell.encode()) if isinstance(cell, str) else np.asarray(cell).data
    return 1, levels + raw.nbytes.to_bytes(4, "little"), raw


def _list_levels(num_elements: int) -> bytes:
    """Return the repetition and definition levels of one list: 0, 1, 1, ..., and the same number of 1s.

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


@lru_cache(maxsize=256)  # all layers of a row have the same size, as do all scalars
def _page_header(uncompressed_bytes: int, num_bytes: int, num_values: int) -> bytes:
    """Return a PageHeader of at most 30 bytes; the sizes do not include the header."""
    data_page = struct({1: i32(num_values), 2: _PLAIN, 3: _RLE, 4: _RLE})
    return record({1: _DATA_PAGE, 2: i32(uncompressed_bytes), 3: i32(num_bytes), 5: data_page})


def _schema_elements(schema: pa.Schema) -> Value:
    """Return the schema tree, depth first; a list has three levels."""
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
