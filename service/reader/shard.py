"""One shard: finds where each layer of each row lies from the Parquet footer, and reads it past pyarrow.

A layer is one uncompressed page of its column, so its bytes are the last of the column chunk, behind their
4-byte length. With `planes`, the high plane goes through pyarrow, which knows its codec.

Legend: T tokens, H hidden size.
"""

import json
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from service.reader.errors import ReaderError
from service.reader.files import LocalFile, RangeFile

METADATA_KEY = b"quarry"
FORMAT_VERSIONS = frozenset({1})
_LENGTH_BYTES = 4
_MAX_PAGE_HEADER_BYTES = 512


@dataclass(frozen=True, slots=True)
class About:
    """What a shard says of itself: whose states, in which form. `layer_ids` are vLLM's, ascending."""

    model: str
    revision: str
    num_layers: int
    layer_ids: tuple[int, ...]
    hidden_size: int
    dtype: torch.dtype
    compression: str
    norm_kind: str
    norm_eps: float

    @classmethod
    def of(cls, metadata: dict[bytes, bytes] | None, name: str) -> "About":
        """Read the `quarry` document of a shard's metadata. Raises ReaderError."""
        if not metadata or METADATA_KEY not in metadata:
            raise ReaderError(f"{name} is no shard of Quarry: its metadata has no 'quarry' document")
        whole = json.loads(metadata[METADATA_KEY])
        identity, norm = whole["identity"], whole["final_norm"]
        if identity["schema_version"] not in FORMAT_VERSIONS:
            version = identity["schema_version"]
            raise ReaderError(
                f"{name} has format version {version}; this reader knows 1: install a newer one"
            )
        return cls(
            model=identity["model"],
            revision=identity["revision"],
            num_layers=identity["num_layers"],
            layer_ids=tuple(identity["layer_ids"]),
            hidden_size=identity["hidden_size"],
            dtype=getattr(torch, identity["dtype"]),
            compression=identity["compression"],
            norm_kind=norm["kind"],
            norm_eps=norm["eps"],
        )


class Shard:
    """An open shard; its footer is read once."""

    def __init__(self, file: RangeFile, name: str) -> None:
        """Read the footer. Raises ReaderError."""
        self._file, self._name = file, name
        try:
            self._parquet: Any = pq.ParquetFile(file.arrow())
        except (OSError, pa.ArrowException) as error:
            raise ReaderError(f"{name} cannot be opened as Parquet: {error}") from error
        schema = self._parquet.schema_arrow
        self.about = About.of(schema.metadata, name)
        self._columns = {column: index for index, column in enumerate(schema.names)}

    def layer(
        self, row: int, layer_id: int, num_tokens: int, *, pinned: bool = False, mapped: bool = False
    ) -> torch.Tensor:
        """Return the states [T, H] of one layer of one row, in the shard's dtype.

        Args:
            row: in the shard.
            layer_id: vLLM's.
            num_tokens: T, as the index says.
            pinned: read into pinned memory.
            mapped: return a view of the page cache instead of a copy; only for local files without `planes`.

        Raises:
            ReaderError: the layer is not there, or the file is damaged.
        """
        about = self.about
        if layer_id not in about.layer_ids:
            raise ReaderError(f"{self._name} holds layers {list(about.layer_ids)}, not {layer_id}")
        num_elements = num_tokens * about.hidden_size
        width = about.dtype.itemsize
        if about.compression == "planes":
            raw = self._merged(row, layer_id, num_elements, width, pinned=pinned)
        else:
            raw = self._plain(row, f"layer_{layer_id}", num_elements * width, pinned=pinned, mapped=mapped)
        return raw.view(about.dtype).view(num_tokens, about.hidden_size)

    def _merged(
        self, row: int, layer_id: int, num_elements: int, width: int, *, pinned: bool
    ) -> torch.Tensor:
        name = f"layer_{layer_id}_hi"
        values = self._parquet.read_row_group(row, columns=[name]).column(0)
        high = bytearray(values[0].as_buffer())
        if len(high) != num_elements:
            raise ReaderError(
                f"{self._name}, row {row}: {name} has {len(high)} bytes, {num_elements} are due"
            )
        low = self._plain(row, f"layer_{layer_id}_lo", num_elements * (width - 1), pinned=False, mapped=False)
        merged = torch.empty((num_elements, width), dtype=torch.uint8, pin_memory=pinned)
        merged[:, width - 1] = torch.frombuffer(high, dtype=torch.uint8)
        merged[:, : width - 1] = low.view(num_elements, width - 1)
        return merged.view(-1)

    def _plain(self, row: int, column: str, num_bytes: int, *, pinned: bool, mapped: bool) -> torch.Tensor:
        chunk = self._parquet.metadata.row_group(row).column(self._columns[column])
        around = chunk.total_compressed_size - num_bytes - _LENGTH_BYTES
        if chunk.total_compressed_size != chunk.total_uncompressed_size or not (
            0 <= around < _MAX_PAGE_HEADER_BYTES
        ):
            raise ReaderError(
                f"{self._name}, row {row}: {column} is not one plain value of {num_bytes} bytes"
            )
        start = chunk.data_page_offset + chunk.total_compressed_size - num_bytes
        if mapped and isinstance(self._file, LocalFile):
            return self._file.mapped(start, num_bytes)
        out = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned)
        self._file.read_into(out, start)
        return out
