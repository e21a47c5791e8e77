"""One shard: finds where each layer of each row lies from the Parquet footer, and reads it past pyarrow.

A layer is one uncompressed page of its column, so its bytes are the last of the column chunk, behind their
4-byte length. With `planes`, the high plane goes through pyarrow, which knows its codec. With `fp8`, codes
and scales are columns side by side, read at once, and a state is their product.

Legend: T tokens, H hidden size, W bytes of one token's state.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from service.reader.errors import ReaderError
from service.reader.files import LocalFile, RangeFile
from service.reader.fp8 import SCALE_BYTES, multiply
from service.reader.memory import POOL

METADATA_KEY = b"quarry"
FORMAT_VERSIONS = frozenset({1})
COMPRESSIONS = ("none", "planes", "fp8")
_LENGTH_BYTES = 4
_MAX_PAGE_HEADER_BYTES = 512
_MAX_GAP_BYTES = 8192
"""Between two values: a page's header, and zeros up to the next block of the disk."""


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
        if identity["compression"] not in COMPRESSIONS:
            raise ReaderError(
                f"{name} is stored as {identity['compression']!r}; this reader knows "
                f"{', '.join(COMPRESSIONS)}: install a newer one"
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
        """Return one layer's states [T, H] of row `row`. Raises ReaderError.

        Args:
            row: number of the row in this shard.
            layer_id: vLLM's id.
            num_tokens: T, as the index says.
            pinned: read into pinned memory.
            mapped: return the page cache's own bytes, if the file is local and the layer is stored plain.
        """
        about = self.about
        if mapped and about.compression == "none" and isinstance(self._file, LocalFile):
            start, num_bytes = self._place(row, self._plain_name(layer_id), num_tokens * self._width)
            raw = self._file.mapped(start, num_bytes)
            return raw.view(about.dtype).view(num_tokens, about.hidden_size)
        return self.layers(row, (layer_id,), num_tokens, pinned=pinned)

    def layers(
        self, row: int, layer_ids: Sequence[int], num_tokens: int, *, pinned: bool = False
    ) -> torch.Tensor:
        """Return several layers' states side by side: [T, len(layer_ids) * H], each read to its place.

        The arguments are those of `layer`. Raises ReaderError.
        """
        shape = num_tokens, len(layer_ids) * self._width
        if pinned:
            out_TW = torch.empty(shape, dtype=torch.uint8, pin_memory=True)
        else:
            out_TW = POOL.lend(shape[0] * shape[1]).view(shape)
        if self.about.compression == "none":
            names = [self._plain_name(layer_id) for layer_id in layer_ids]
            self._file.expect(self._place(row, name, num_tokens * self._width) for name in names)
        for at, layer_id in enumerate(layer_ids):
            self._fill(row, layer_id, out_TW[:, at * self._width : (at + 1) * self._width])
        return out_TW.view(self.about.dtype)

    @property
    def _width(self) -> int:
        """Bytes of one token's state."""
        return self.about.hidden_size * self.about.dtype.itemsize

    def _plain_name(self, layer_id: int) -> str:
        if layer_id not in self.about.layer_ids:
            raise ReaderError(f"{self._name} holds layers {list(self.about.layer_ids)}, not {layer_id}")
        return f"layer_{layer_id}"

    def _fill(self, row: int, layer_id: int, out_TW: torch.Tensor) -> None:
        """Read a layer into `out_TW`, uint8 [T, W], whose tokens may lie apart."""
        name = self._plain_name(layer_id)
        try:
            if self.about.compression == "planes":
                self._merge(row, name, out_TW)
            elif self.about.compression == "fp8":
                self._multiply(row, name, out_TW)
            else:
                start, _ = self._place(row, name, out_TW.numel())
                self._file.read_into(out_TW, start)
        except OSError as error:
            # The system names a file only where it is opened; an error of pyarrow's own has no number.
            if error.errno is not None and error.filename is None:
                error.filename = self._name
            raise

    def _multiply(self, row: int, name: str, out_TW: torch.Tensor) -> None:
        num_tokens, hidden_size = len(out_TW), self.about.hidden_size
        codes_at, num_codes = self._place(row, name, num_tokens * hidden_size)
        scales_at, num_bytes = self._place(row, f"{name}_scale", num_tokens * SCALE_BYTES)
        if not codes_at + num_codes <= scales_at <= codes_at + num_codes + _MAX_GAP_BYTES:
            raise ReaderError(f"{self._name}, row {row}: {name}_scale does not follow {name}")
        both = torch.empty(scales_at + num_bytes - codes_at, dtype=torch.uint8, device="cpu")
        self._file.read_into(both.view(1, -1), codes_at)
        # A copy: the file does not put scales where a float32 may begin.
        scales_T = both[-num_bytes:].clone().view(torch.float32)
        codes_TH = both[:num_codes].view(num_tokens, hidden_size)
        multiply(codes_TH, scales_T, out_TW.view(self.about.dtype))

    def _merge(self, row: int, name: str, out_TW: torch.Tensor) -> None:
        width = self.about.dtype.itemsize
        num_elements = out_TW.numel() // width
        values = self._parquet.read_row_group(row, columns=[f"{name}_hi"]).column(0)
        high = bytearray(values[0].as_buffer())
        if len(high) != num_elements:
            raise ReaderError(
                f"{self._name}, row {row}: {name}_hi has {len(high)} bytes, {num_elements} are due"
            )
        start, num_bytes = self._place(row, f"{name}_lo", num_elements * (width - 1))
        low = torch.empty(num_bytes, dtype=torch.uint8)
        self._file.read_into(low.view(1, -1), start)
        parts_THB = out_TW.view(len(out_TW), self.about.hidden_size, width)
        shape = parts_THB.shape[:2]
        parts_THB[..., width - 1] = torch.frombuffer(high, dtype=torch.uint8).view(shape)
        parts_THB[..., : width - 1] = low.view(*shape, width - 1)

    def _place(self, row: int, column: str, num_bytes: int) -> tuple[int, int]:
        """Return where the value of `num_bytes` bytes lies in the file: its first byte, and its length."""
        chunk = self._parquet.metadata.row_group(row).column(self._columns[column])
        around = chunk.total_compressed_size - num_bytes - _LENGTH_BYTES
        if chunk.total_compressed_size != chunk.total_uncompressed_size or not (
            0 <= around < _MAX_PAGE_HEADER_BYTES
        ):
            raise ReaderError(
                f"{self._name}, row {row}: {column} is not one plain value of {num_bytes} bytes"
            )
        return chunk.data_page_offset + chunk.total_compressed_size - num_bytes, num_bytes
