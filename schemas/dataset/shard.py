"""Reads one sealed shard: its footer, its rows without their states, and the bytes of one layer of one row.

An uncompressed layer is at the end of its column chunk, after a 4-byte length. It is read directly at the
offset from the footer, since pyarrow would copy it twice. Every length is checked before memory is allocated
for it. `schemas.dataset.states` makes tensors from the bytes; this module does not need torch.

A damaged file raises DatasetError, except that pyarrow crashes the process on some damaged footers: read a
file whose hash is wrong in a separate process.

Legend: T tokens, H hidden size.
"""

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash
from numpy.typing import NDArray
from pydantic import ValidationError

from schemas.base import first_fault
from schemas.dataset.codecs.planes import merge_planes
from schemas.dataset.columns import LAYER_PREFIX, METADATA_KEY, SCALE_BYTES, layer_columns, shard_schema
from schemas.dataset.errors import DatasetError
from schemas.dataset.files import LocalFile, RangeFile
from schemas.dataset.memory import Bytes
from schemas.identity import DTYPE_BYTES, Provenance

_MAX_PAGE_HEADER_BYTES = 512
_LENGTH_BYTES = 4
_CHECKSUM_BYTES = 8
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
"""The first bytes of a zstd frame, which follows the page header."""
_MAX_GAP_BYTES = 8192
"""Maximum gap between two values: a page header, and zeros up to the next disk block."""


@dataclass(frozen=True, slots=True)
class LightRow:
    """A row without its states: `input_ids` int32 [T], `loss_mask` uint8 [T], one xxh3_64 per layer."""

    sample_id: str
    source_id: str | None
    num_tokens: int
    prompt_tokens: int
    hidden_size: int
    input_ids: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]
    checksums: tuple[int, ...]


@contextmanager
def open_shard(path: Path) -> "Iterator[Shard]":
    """Open a local shard within the context, read through the page cache. Raises DatasetError, OSError."""
    with closing(LocalFile(path)) as file, closing(Shard(file, path.name)) as shard:
        yield shard


class Shard:
    """An open shard. All methods raise DatasetError, and OSError with the file's name."""

    def __init__(self, file: RangeFile, name: str) -> None:
        """Read the footer and check the schema against the one that its provenance requires."""
        self._file, self.name = file, name
        with self._naming("the file cannot be opened as Parquet"):
            self._parquet: Any = pq.ParquetFile(file.arrow(), pre_buffer=False)
        self.provenance = self._read_provenance()
        self._check_footer()
        self._checksums: dict[int, tuple[int, ...]] = {}

    def close(self) -> None:
        """Release the file without closing it."""
        self._parquet.close(force=True)

    @cached_property
    def light(self) -> tuple[LightRow, ...]:
        """All rows without their states, in file order."""
        names = [name for name in self._columns if not name.startswith(LAYER_PREFIX)]
        with self._naming("the light columns cannot be read"):
            table = self._parquet.read(columns=names, use_threads=False)
            table.validate(full=True)
            lists = {name: _lists(table, name) for name in ("input_ids", "loss_mask", "checksums")}
            scalars = table.drop_columns(list(lists)).to_pylist()
        rows = tuple(
            LightRow(
                **scalar,
                input_ids=lists["input_ids"][row],
                loss_mask=lists["loss_mask"][row],
                checksums=tuple(int(checksum) for checksum in lists["checksums"][row]),
            )
            for row, scalar in enumerate(scalars)
        )
        for row, light in enumerate(rows):
            self._check_lengths(row, light)
        return rows

    def sample_id(self, row: int) -> str | None:
        """Return the id of a row's sample as the footer has it; None where it has none."""
        with self._naming(f"row {row} cannot be found"):
            chunk = self._parquet.metadata.row_group(row).column(self._columns["sample_id"])
            return chunk.statistics.min if chunk.is_stats_set and chunk.statistics.has_min_max else None

    def layer_bytes(self, row: int, layer_id: int, num_tokens: int | None = None) -> tuple[Bytes, ...]:
        """Return the bytes of one layer of one row that its checksum covers, in one or two arrays.

        With fp8 they are T * H codes and T scales; otherwise one array of T * H elements of the dtype, with
        planes merged. `num_tokens` is T if the caller knows it, so that the light columns need not be read.
        The arrays are valid as long as the result of the file's `read`.
        """
        identity = self.provenance.identity
        if layer_id not in identity.layer_ids:
            raise self._error(f"it holds layers {list(identity.layer_ids)}, not {layer_id}")
        if num_tokens is None:
            num_tokens = self.light[row].num_tokens
        columns = layer_columns((layer_id,), identity.compression)
        num_elements, width = num_tokens * identity.hidden_size, DTYPE_BYTES[identity.dtype]
        with self._naming(f"row {row}: layer {layer_id} cannot be read"):
            if identity.compression == "none":
                return self._plain(row, columns, (num_elements * width,))
            if identity.compression == "fp8":
                return self._plain(row, columns, (num_elements, num_tokens * SCALE_BYTES))
            high, low = columns
            (lo,) = self._plain(row, (low,), (num_elements * (width - 1),))
            return (merge_planes(self._packed(row, high, num_elements), lo, width),)

    def checked_bytes(self, row: int, layer_id: int, num_tokens: int | None = None) -> tuple[Bytes, ...]:
        """Return the same after holding it against its checksum; no other light column is read."""
        layer = self.layer_bytes(row, layer_id, num_tokens)
        stored = self._checksums_of(row)[self.provenance.identity.layer_ids.index(layer_id)]
        if (checksum := checksum_of(layer)) != stored:
            what = f"its bytes have xxh3 {checksum:016x}, {stored:016x} is stored"
            raise self._error(f"row {row}: layer {layer_id}: {what}")
        return layer

    def mapped(self, row: int, layer_ids: Sequence[int], num_tokens: int) -> Bytes | None:
        """Return the bytes [L, T * H * width] of layers of one row as a view of the mapped file.

        Return None if there is no such view: the file is not local, the states are compressed, or the layers
        are not evenly spaced, which may happen with small layers.
        """
        identity = self.provenance.identity
        if identity.compression != "none" or not isinstance(self._file, LocalFile):
            return None
        width = DTYPE_BYTES[identity.dtype]
        num_bytes = num_tokens * identity.hidden_size * width
        with self._naming(f"row {row}: layers {list(layer_ids)} cannot be mapped"):
            columns = layer_columns(tuple(layer_ids), identity.compression)
            begins = [self._plain_start(row, column, num_bytes) + _LENGTH_BYTES for column in columns]
            distance, *others = {second - first for first, second in pairwise(begins)} or {num_bytes}
            if others or distance < num_bytes or distance % width or begins[0] % width:
                return None
            mapping = self._file.mapping
            for column, begin in zip(columns, begins, strict=True):
                self._check_length(row, column, mapping[begin - _LENGTH_BYTES : begin], num_bytes)
            if begins[-1] + num_bytes > mapping.size:
                raise self._error(f"row {row}: {columns[-1]} ends behind the file")
        shape, strides = (len(begins), num_bytes), (distance, 1)
        return np.lib.stride_tricks.as_strided(mapping[begins[0] :], shape, strides)

    def _read_provenance(self) -> Provenance:
        text = (self._parquet.schema_arrow.metadata or {}).get(METADATA_KEY)
        if text is None:
            raise self._error("not a shard of Quarry: its metadata has no 'quarry' document")
        try:
            return Provenance.model_validate_json(text)
        except ValidationError as error:
            raise self._error(f"not a shard of this version: {first_fault(error)}") from error

    def _check_footer(self) -> None:
        identity = self.provenance.identity
        schema = self._parquet.schema_arrow
        form = (identity.layer_ids, identity.hidden_size, identity.dtype, identity.compression)
        if not schema.equals(shard_schema(*form)):
            raise self._error("the columns are not those that its provenance asks for")
        metadata = self._parquet.metadata
        if metadata.num_row_groups != metadata.num_rows:
            counts = f"{metadata.num_rows} rows in {metadata.num_row_groups} row groups"
            raise self._error(f"{counts}; each must have its own")
        self._columns = {name: index for index, name in enumerate(schema.names)}

    def _check_lengths(self, row: int, light: LightRow) -> None:
        identity = self.provenance.identity
        pairs = {
            "input_ids": (len(light.input_ids), light.num_tokens),
            "loss_mask": (len(light.loss_mask), light.num_tokens),
            "checksums": (len(light.checksums), len(identity.layer_ids)),
            "hidden_size": (light.hidden_size, identity.hidden_size),
        }
        for name, (stored, expected) in pairs.items():
            if stored != expected:
                raise self._error(f"row {row} ({light.sample_id}): {name} is {stored}, expected {expected}")
        if not 0 <= light.prompt_tokens <= light.num_tokens or light.num_tokens < 1:
            lengths = f"num_tokens {light.num_tokens}, prompt_tokens {light.prompt_tokens}"
            raise self._error(f"row {row} ({light.sample_id}): {lengths}")

    def _checksums_of(self, row: int) -> tuple[int, ...]:
        """Return the checksum of every layer of a row, read past pyarrow: they end a page of their own."""
        if row not in self._checksums:
            num_bytes = len(self.provenance.identity.layer_ids) * _CHECKSUM_BYTES
            with self._naming(f"row {row}: its checksums cannot be read"):
                frame, page_bytes = self._frame(row, "checksums", num_bytes)
                page = np.frombuffer(pa.Codec("zstd").decompress(frame, page_bytes), np.uint8)
                self._checksums[row] = tuple(page[-num_bytes:].view("<u8").tolist())
        return self._checksums[row]

    def _plain(self, row: int, columns: tuple[str, ...], sizes: tuple[int, ...]) -> tuple[Bytes, ...]:
        """Read adjacent uncompressed values, each at the end of its column chunk, in one read."""
        begins = [self._plain_start(row, column, size) for column, size in zip(columns, sizes, strict=True)]
        ends = [begin + _LENGTH_BYTES + size for begin, size in zip(begins, sizes, strict=True)]
        for end, begin in zip(ends, begins[1:], strict=False):
            if not 0 <= begin - end <= _MAX_GAP_BYTES:
                raise self._error(f"row {row}: {' and '.join(columns)} do not lie side by side")
        whole = self._file.read(begins[0], ends[-1] - begins[0])
        values = []
        for column, begin, size in zip(columns, begins, sizes, strict=True):
            start = begin - begins[0]
            self._check_length(row, column, whole[start : start + _LENGTH_BYTES], size)
            values.append(whole[start + _LENGTH_BYTES : start + _LENGTH_BYTES + size])
        return tuple(values)

    def _check_length(self, row: int, column: str, stored: Bytes, num_bytes: int) -> None:
        if int.from_bytes(stored.tobytes(), "little") != num_bytes:
            raise self._error(f"row {row}: {column} is not one uncompressed value of {num_bytes} bytes")

    def _plain_start(self, row: int, column: str, num_bytes: int) -> int:
        """Return the offset of an uncompressed value's 4-byte length."""
        chunk = self._chunk(row, column, num_bytes)
        # The codec is not read from the footer: pyarrow aborts the process on an unknown codec.
        if chunk.total_compressed_size != chunk.total_uncompressed_size:
            raise self._error(f"row {row}: {column} is compressed")
        return int(chunk.data_page_offset + chunk.total_compressed_size - num_bytes - _LENGTH_BYTES)

    def _packed(self, row: int, column: str, num_bytes: int) -> Bytes:
        """Decompress a value into memory of its expected size: pyarrow would trust the page header for it."""
        frame, _ = self._frame(row, column, num_bytes)
        page = pa.Codec("zstd").decompress(frame, num_bytes + _LENGTH_BYTES)
        stored = int.from_bytes(page[:_LENGTH_BYTES], "little")
        if stored != num_bytes:
            raise self._error(f"row {row}: {column} has {stored} bytes, expected {num_bytes}")
        return np.frombuffer(page, np.uint8)[_LENGTH_BYTES:]

    def _frame(self, row: int, column: str, num_bytes: int) -> tuple[Bytes, int]:
        """Return a page's zstd frame, and the page's uncompressed length according to the footer."""
        chunk = self._chunk(row, column, num_bytes)
        raw = self._file.read(chunk.data_page_offset, chunk.total_compressed_size)
        begin = raw[:_MAX_PAGE_HEADER_BYTES].tobytes().find(_ZSTD_MAGIC)
        if begin < 0:
            raise self._error(f"row {row}: {column} is not compressed by zstd")
        return raw[begin:], chunk.total_uncompressed_size - begin

    def _chunk(self, row: int, column: str, num_bytes: int) -> Any:  # noqa: ANN401 - untyped pyarrow
        """Return a column chunk's metadata after checking that its size fits a value of `num_bytes`."""
        chunk = self._parquet.metadata.row_group(row).column(self._columns[column])
        if not 0 <= chunk.total_uncompressed_size - num_bytes - _LENGTH_BYTES < _MAX_PAGE_HEADER_BYTES:
            size = chunk.total_uncompressed_size
            raise self._error(f"row {row}: {column} takes {size} bytes, expected {num_bytes} and a header")
        return chunk

    def _error(self, detail: str) -> DatasetError:
        return DatasetError(f"{self.name}: {detail}")

    @contextmanager
    def _naming(self, what: str) -> Iterator[None]:
        """Turn pyarrow's errors about bad bytes into DatasetError, and add the file name to OSErrors."""
        try:
            yield
        except DatasetError:
            raise
        except OSError as error:
            if error.errno is None:  # pyarrow's own
                raise self._error(f"{what}: {error}") from error
            error.filename = error.filename or self.name
            raise
        except (pa.ArrowException, EOFError, ValueError, LookupError, MemoryError, OverflowError) as error:
            raise self._error(f"{what}: {error}") from error


def checksum_of(layer: tuple[Bytes, ...]) -> int:
    """Return the xxh3_64 of what `Shard.layer_bytes` returns of a layer."""
    xxh3 = xxhash.xxh3_64()
    for part in layer:
        xxh3.update(part.data)
    return int(xxh3.intdigest())


def _lists(table: pa.Table, name: str) -> list[NDArray[Any]]:
    """Return a list column as one numpy view per row."""
    column = table.column(name).combine_chunks()
    offsets, values = column.offsets.to_numpy(), column.values.to_numpy()
    return [values[start:stop] for start, stop in pairwise(offsets)]
