"""Encodes a row's layers as stored columns: plain, split into two planes, or quantized to fp8.

An encoded layer overwrites the layer in its row's slab, so no encoding needs extra memory for a row's states.

Legend: T tokens, L captured layers, H hidden size.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from connector.rowcheck import Look, StatesWrongError, as_float32, check_distinct
from schemas.dataset.codecs.fp8 import NotQuantizedError, Quantizer
from schemas.dataset.codecs.planes import split_planes
from schemas.request import Compression


def state_columns(
    compression: Compression, layer_ids: tuple[int, ...], states_LTH: torch.Tensor, look: Look
) -> Iterator[NDArray[Any]]:
    """Yield the row's state columns in file order, then a checksum per layer; overwrites layers unless plain.

    A high plane is valid until the next one is requested. `look` is of the same states; what the checksums
    cover is in `schemas.dataset.columns`. Raises StatesWrongError if two layers are the same, or if a layer
    cannot be restored from its fp8 codes.
    """
    check_distinct(look.checksums, layer_ids)
    checksums = list(look.checksums)
    _, num_tokens, hidden_size = states_LTH.shape
    quantizer = Quantizer(hidden_size) if compression == "fp8" else None
    for index, layer_TH in enumerate(states_LTH):
        raw = layer_TH.reshape(-1).view(torch.uint8).numpy()
        if quantizer is not None:
            codes = raw[: num_tokens * hidden_size]
            codes_TH = torch.from_numpy(codes).view(num_tokens, hidden_size)
            largest_T = torch.from_numpy(as_float32(look.largest_LT[index], states_LTH.dtype))
            try:
                scales = quantizer.quantize(layer_TH, largest_T, codes_TH).view(torch.uint8).numpy()
            except NotQuantizedError as error:
                raise StatesWrongError(f"layer {layer_ids[index]}: {error}") from error
            checksum = xxhash.xxh3_64(codes.data)
            checksum.update(scales.data)
            checksums[index] = checksum.intdigest()
            yield codes
            yield scales
        elif compression == "planes":
            yield from split_planes(raw, states_LTH.element_size())
        else:
            yield raw
    yield np.array(checksums, np.uint64)
