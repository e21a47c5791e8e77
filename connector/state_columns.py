"""A row's layers as the columns that they are stored in: as they are, in two planes, or quantized to fp8.

Columns come one after another, and the writer writes each before it asks for the next. So the plain form
takes no memory, and the quantized one that of a single layer, whatever a row holds.

Legend: T tokens, L captured layers, H hidden size.
"""

from collections.abc import Generator, Iterator
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from connector.rowcheck import Look, StatesWrongError, as_float32, check_distinct
from schemas.dataset.codecs.fp8 import NotQuantizedError, Quantizer
from schemas.dataset.codecs.planes import split_planes
from schemas.dataset.columns import SCALE_BYTES
from schemas.dataset.memory import Bytes, page_aligned
from schemas.request import Compression


class StateColumns:
    """Makes the state columns of rows of one dataset; owns what they are made in. Lives on one thread."""

    def __init__(
        self, compression: Compression, layer_ids: tuple[int, ...], hidden_size: int, dtype: torch.dtype
    ) -> None:
        """Take the layers' ids, H, and the dtype of what is captured."""
        self._compression, self._layer_ids = compression, layer_ids
        self._width = dtype.itemsize
        self._quantizer = Quantizer(hidden_size) if compression == "fp8" else None
        self._buffer = np.empty(0, np.uint8)

    def of(self, states_LTH: torch.Tensor, look: Look) -> Iterator[NDArray[Any]]:
        """Yield the row's state columns in file order, then a checksum a layer.

        An array may lose its bytes when the next is asked for. `look` is of the same states;
        `schemas.dataset.columns` says what the checksums are over. Raises StatesWrongError if two layers are
        the same, or if one does not come back from its codes.
        """
        check_distinct(look.checksums, self._layer_ids)
        checksums = look.checksums
        if self._quantizer is not None:
            checksums = yield from self._quantized(self._quantizer, states_LTH, look)
        else:
            for layer_TH in states_LTH:
                raw = layer_TH.reshape(-1).view(torch.uint8).numpy()
                if self._compression == "none":
                    yield raw
                else:
                    yield from split_planes(raw, self._width)
        yield np.array(checksums, np.uint64)

    def _quantized(
        self, quantizer: Quantizer, states_LTH: torch.Tensor, look: Look
    ) -> Generator[Bytes, None, tuple[int, ...]]:
        """Yield each layer's codes and scales; return their checksums."""
        _, num_tokens, hidden_size = states_LTH.shape
        num_codes = num_tokens * hidden_size
        room = self._room(num_codes + -num_codes % SCALE_BYTES + num_tokens * SCALE_BYTES)
        codes = room[:num_codes]
        scales = room[num_codes + -num_codes % SCALE_BYTES :]
        codes_TH = torch.from_numpy(codes).view(num_tokens, hidden_size)
        scales_T = torch.from_numpy(scales).view(torch.float32)
        largest_LT = torch.from_numpy(as_float32(look.largest_LT, states_LTH.dtype))
        checksums = []
        for layer_id, layer_TH, largest_T in zip(self._layer_ids, states_LTH, largest_LT, strict=True):
            try:
                quantizer.quantize(layer_TH, largest_T, codes_TH, scales_T)
            except NotQuantizedError as error:
                raise StatesWrongError(f"layer {layer_id}: {error}") from error
            checksum = xxhash.xxh3_64(codes.data)
            checksum.update(scales.data)
            checksums.append(checksum.intdigest())
            yield codes
            yield scales
        return tuple(checksums)

    def _room(self, num_bytes: int) -> NDArray[np.uint8]:
        """Return memory that begins on a page, so that the disk takes long codes as they lie."""
        if self._buffer.size < num_bytes:
            self._buffer = page_aligned(num_bytes)
        return self._buffer[:num_bytes]
