"""Reads one sealed shard: its light columns, and one layer of one row as a torch tensor.

Imports torch: import it lazily. A layer is read by one `preadv` at the place the footer names, past pyarrow,
which would copy it twice; every length is checked before anything is allocated.

A damaged file raises DatasetBroken, except that pyarrow ends the process over some damaged footers: read a
file whose hash is wrong in a process of its own.

Legend: T tokens, H hidden size.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from pydantic import ValidationError

from schemas.dataset.codecs.fp8 import SCALE_BYTES, dequantize, half_steps, misfits
from schemas.dataset.codecs.planes import merge_planes
from schemas.dataset.columns import LAYER_PREFIX, METADATA_KEY, layer_columns, shard_schema
from schemas.identity import DTYPE_BYTES, Provenance
from service.errors import DatasetBroken

_MAX_PAGE_HEADER_BYTES = 512
LENGTH_BYTES = 4


@dataclass(frozen=True, slots=True)
class LightRow:
    """A row without its states: `input_ids` int32 [T], `loss_mask` uint8 [T], one xxh3_64 a layer."""

    sample_id: str
    source_id: str | None
    num_tokens: int
    prompt_tokens: int
    hidden_size: int
    input_ids: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]
    checksums: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StoredState:
    """One token's state [H] of the shard's dtype, and how far each captured value may lie from it.

    `half_H` is float32, half a step of each code; null where the bits are those that were captured.
    """

    state_H: torch.Tensor
    half_H: torch.Tensor | None


class ShardReader:
    """An open shard; a context manager. All raise DatasetBroken, naming the file and what is wrong in it."""

    def __init__(self, path: Path) -> None:
        """Read the footer and hold the schema against the one its own provenance asks for."""
        self.path = path
        with self._naming("the file cannot be opened as Parquet"):
            self._file = pq.ParquetFile(path)
            self._fd = os.open(path, os.O_RDONLY)
        try:
            self._check_footer()
        except DatasetBroken:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; safe to call once."""
        self._file.close()
        os.close(self._fd)

    @property
    def num_rows(self) -> int:
        """Rows of the shard, as its footer says; each is a row group of its own."""
        return int(self._file.metadata.num_rows)

    @cached_property
    def provenance(self) -> Provenance:
        """Who made the shard, from its Parquet metadata."""
        text = (self._file.schema_arrow.metadata or {}).get(METADATA_KEY)
        if text is None:
            raise self._broken(f"no {METADATA_KEY.decode()!r} document in the Parquet metadata")
        try:
            return Provenance.model_validate_json(text)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            what = f"the provenance in its metadata is wrong at {where!r}: {first['msg']}"
            raise self._broken(what) from error

    @cached_property
    def light(self) -> tuple[LightRow, ...]:
        """All rows without their states, in file order."""
        names = [name for name in self._file.schema_arrow.names if not name.startswith(LAYER_PREFIX)]
        with self._naming("the light columns cannot be read"):
            table = self._file.read(columns=names)
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

    def layer_bytes(self, row: int, layer_id: int) -> NDArray[np.uint8]:
        """Return the bytes of one layer of one row that its checksum is over.

        With planes these are the merged ones, T * H elements of the dtype; with fp8 T * H codes, and behind
        them T scales.
        """
        sizes = self._sizes(row, layer_id)
        if sizes is not None:
            parts = [self._plain(row, column, num_bytes) for column, num_bytes in sizes.items()]
            return parts[0] if len(parts) == 1 else np.concatenate(parts)
        identity = self.provenance.identity
        width = DTYPE_BYTES[identity.dtype]
        num_elements = self.light[row].num_tokens * identity.hidden_size
        high, low = layer_columns((layer_id,), identity.compression)
        hi = self._packed(row, high, num_elements)
        return merge_planes(hi, self._plain(row, low, num_elements * (width - 1)), width)

    def layer_places(self, row: int, layer_id: int) -> tuple[tuple[int, int], ...] | None:
        """Return where a layer's values lie, none if one is compressed.

        Of each value the offset of its 4-byte length, and its bytes; together they are what `layer_bytes`
        gives.
        """
        sizes = self._sizes(row, layer_id)
        if sizes is None:
            return None
        with self._naming(f"row {row}: layer {layer_id} cannot be read"):
            return tuple(
                (self._plain_start(self._chunk(row, column, num_bytes), num_bytes), num_bytes)
                for column, num_bytes in sizes.items()
            )

    def states(self, raw: NDArray[np.uint8]) -> torch.Tensor:
        """Return what `layer_bytes` gave as states [T, H] of the shard's dtype; only fp8 is copied."""
        identity = self.provenance.identity
        dtype: torch.dtype = getattr(torch, identity.dtype)
        if identity.compression == "fp8":
            return dequantize(*self._quantized(raw), dtype)
        return torch.from_numpy(raw).view(dtype).view(-1, identity.hidden_size)

    def last_state(self, raw: NDArray[np.uint8]) -> StoredState:
        """Return the last token's state of what `layer_bytes` gave."""
        if not self.lossy:
            return StoredState(self.states(raw)[-1].clone(), None)
        codes_TH, scales_T = self._quantized(raw)
        dtype: torch.dtype = getattr(torch, self.provenance.identity.dtype)
        (state_H,) = dequantize(codes_TH[-1:], scales_T[-1:], dtype)
        return StoredState(state_H, half_steps(codes_TH[-1], float(scales_T[-1])))

    def misfits(self, raw: NDArray[np.uint8]) -> torch.Tensor | None:
        """Return the tokens, bool [T], whose codes and scale nobody stores; none where states are exact."""
        return misfits(*self._quantized(raw)) if self.lossy else None

    @property
    def lossy(self) -> bool:
        """Say whether what is read is only near what was captured."""
        return self.provenance.identity.compression == "fp8"

    def _quantized(self, raw: NDArray[np.uint8]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the codes, uint8 [T, H], and the scales, float32 [T]."""
        hidden_size = self.provenance.identity.hidden_size
        num_tokens = len(raw) // (hidden_size + SCALE_BYTES)
        codes, scales = np.split(raw, [num_tokens * hidden_size])
        # A copy: behind codes of any number scales need not begin where a float32 may.
        scales_T = torch.from_numpy(scales.copy()).view(torch.float32)
        return torch.from_numpy(codes).view(num_tokens, hidden_size), scales_T

    def _sizes(self, row: int, layer_id: int) -> dict[str, int] | None:
        """Return the bytes that each column of a layer has, none if one of them is compressed."""
        identity = self.provenance.identity
        columns = layer_columns((layer_id,), identity.compression)
        num_tokens = self.light[row].num_tokens
        each: tuple[int, ...]
        if identity.compression == "none":
            each = (num_tokens * identity.hidden_size * DTYPE_BYTES[identity.dtype],)
        elif identity.compression == "fp8":
            each = (num_tokens * identity.hidden_size, num_tokens * SCALE_BYTES)
        else:
            return None
        return dict(zip(columns, each, strict=True))

    def layer(self, row: int, layer_id: int) -> torch.Tensor:
        """Return the states [T, H] of one layer of one row, in the shard's dtype."""
        return self.states(self.layer_bytes(row, layer_id))

    def _check_footer(self) -> None:
        identity = self.provenance.identity
        about = (identity.layer_ids, identity.hidden_size, identity.dtype, identity.compression)
        if not self._file.schema_arrow.equals(shard_schema(*about)):
            raise self._broken("the columns are not those that its provenance asks for")
        metadata = self._file.metadata
        if metadata.num_row_groups != metadata.num_rows:
            counts = f"{metadata.num_rows} rows in {metadata.num_row_groups} row groups"
            raise self._broken(f"{counts}; one each is due")
        self._column_index = {name: index for index, name in enumerate(self._file.schema_arrow.names)}

    def _check_lengths(self, row: int, light: LightRow) -> None:
        identity = self.provenance.identity
        due = {
            "input_ids": (len(light.input_ids), light.num_tokens),
            "loss_mask": (len(light.loss_mask), light.num_tokens),
            "checksums": (len(light.checksums), len(identity.layer_ids)),
            "hidden_size": (light.hidden_size, identity.hidden_size),
        }
        for name, (found, expected) in due.items():
            if found != expected:
                raise self._broken(f"row {row} ({light.sample_id}): {name} is {found}, {expected} is due")
        if not 0 <= light.prompt_tokens <= light.num_tokens or light.num_tokens < 1:
            lengths = f"num_tokens {light.num_tokens}, prompt_tokens {light.prompt_tokens}"
            raise self._broken(f"row {row} ({light.sample_id}): {lengths}")

    def _chunk(self, row: int, column: str, num_bytes: int) -> Any:  # noqa: ANN401 - untyped pyarrow
        """Return a column chunk's metadata after checking that it has room for just `num_bytes`."""
        chunk = self._file.metadata.row_group(row).column(self._column_index[column])
        if not 0 <= chunk.total_uncompressed_size - num_bytes - LENGTH_BYTES < _MAX_PAGE_HEADER_BYTES:
            found = f"{column} takes {chunk.total_uncompressed_size} bytes"
            raise self._broken(f"row {row}: {found} where {num_bytes} and a page header are due")
        return chunk

    def _plain_start(self, chunk: Any, num_bytes: int) -> int:  # noqa: ANN401 - untyped pyarrow
        """Return the offset of an uncompressed value's 4-byte length; the value ends its chunk."""
        # Not asked of the footer: pyarrow aborts the process over a codec it does not know.
        if chunk.total_compressed_size != chunk.total_uncompressed_size:
            raise ValueError("it is compressed")
        return int(chunk.data_page_offset + chunk.total_compressed_size - num_bytes - LENGTH_BYTES)

    def _plain(self, row: int, column: str, num_bytes: int) -> NDArray[np.uint8]:
        """Read an uncompressed value: the last `num_bytes` of its chunk, behind their 4-byte length."""
        length, payload = np.empty(LENGTH_BYTES, np.uint8), np.empty(num_bytes, np.uint8)
        with self._naming(f"row {row}: {column} cannot be read"):
            start = self._plain_start(self._chunk(row, column, num_bytes), num_bytes)
            count = os.preadv(self._fd, [length.data, payload.data], start)
        told = int.from_bytes(length.tobytes(), "little")
        if count != LENGTH_BYTES + num_bytes or told != num_bytes:
            raise self._broken(f"row {row}: {column} is not one uncompressed value of {num_bytes} bytes")
        return payload

    def _packed(self, row: int, column: str, num_bytes: int) -> NDArray[np.uint8]:
        """Read a compressed value through pyarrow."""
        with self._naming(f"row {row}: {column} cannot be read"):
            self._chunk(row, column, num_bytes)
            values = self._file.read_row_group(row, columns=[column]).column(column).combine_chunks()
            if len(values) != 1 or values.null_count:
                raise self._broken(f"row {row}: {column} holds {len(values)} values, one is due")
            payload = np.frombuffer(values[0].as_buffer(), np.uint8)
        if payload.size != num_bytes:
            raise self._broken(f"row {row}: {column} has {payload.size} bytes where {num_bytes} are due")
        return payload

    def _broken(self, detail: str) -> DatasetBroken:
        return DatasetBroken(f"{self.path.name}: {detail}")

    @contextmanager
    def _naming(self, what: str) -> Iterator[None]:
        """Turn whatever pyarrow and the operating system say of bad bytes into DatasetBroken."""
        try:
            yield
        except (pa.ArrowException, OSError, ValueError, LookupError, MemoryError, OverflowError) as error:
            raise self._broken(f"{what}: {error}") from error


def _lists(table: pa.Table, name: str) -> list[NDArray[Any]]:
    """Return a list column as one numpy view a row."""
    column = table.column(name).combine_chunks()
    offsets, values = column.offsets.to_numpy(), column.values.to_numpy()
    return [values[start:stop] for start, stop in pairwise(offsets)]
