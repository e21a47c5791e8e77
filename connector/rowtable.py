"""The cache as a table of rows, one token's states of one layer each, whatever its layout.

Legend: B blocks, L captured layers, S slots a block, H hidden size, T tokens of a request, R rows.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray


class RowTable:
    """Finds the rows of a request in a cache of any axis order, physical layout and padding.

    Row numbers count in the rows' pitch: the largest step that every stride of the cache is a multiple of.
    """

    def __init__(self, cache_BLSH: torch.Tensor) -> None:
        """Look at `cache_BLSH`, a view of the engine's own memory; a row's H states must lie side by side."""
        *sizes, hidden_size = cache_BLSH.shape
        strides = cache_BLSH.stride()[:3]
        pitch = math.gcd(*strides)
        self._per_block, per_layer, per_slot = (stride // pitch for stride in strides)
        self._layers_L1 = np.arange(sizes[1], dtype=np.int64)[:, None] * per_layer
        self._slots_S = np.arange(sizes[2], dtype=np.int64) * per_slot
        last = sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True)) // pitch
        self.rows_RH = cache_BLSH.as_strided((last + 1, hidden_size), (pitch, 1))
        """The same memory, so that a row number is an index; rows overlap where the pitch is below H."""

    def numbers(self, block_ids: Sequence[int], num_tokens: int) -> NDArray[np.int64]:
        """Return the numbers of a request's L * T rows, layer by layer and in token order."""
        blocks_B1 = np.asarray(block_ids, dtype=np.int64)[:, None] * self._per_block
        tokens_T = (blocks_B1 + self._slots_S).reshape(-1)[:num_tokens]
        return (self._layers_L1 + tokens_T).reshape(-1)
