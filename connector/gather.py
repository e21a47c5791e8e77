"""Copies a request's states from paged blocks into a host slab in which each layer is contiguous.

This module copies on a CPU; `connector.cuda_gather` copies from a GPU. The host makes no other copy.

Legend: B blocks, L captured layers, S slots per block, H hidden size, T tokens of the request, W words of a
state.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from connector.sums import Sums, add_up, words_of

Request = tuple[Sequence[int], torch.Tensor]
"""A request's blocks in token order, and its slab as `[L, T, H]`."""


class Copy(Protocol):
    """A copy in progress."""

    def done(self) -> bool:
        """Return whether the slab holds all its bytes; never blocks."""

    def sums(self) -> Sums:
        """Return the sums [L, T] of the states as read from the cache; call it once the copy is done."""


class _Finished:
    def __init__(self, sums_LT: Sums) -> None:
        self._sums_LT = sums_LT

    def done(self) -> bool:
        return True

    def sums(self) -> Sums:
        return self._sums_LT


class CpuGather:
    """Copies on the calling thread, one layer of a block at a time, and sums it while it is in the CPU cache.

    It uses numpy, which moves a block as one piece of memory: torch takes ten times as long for the same
    strides, and uses the model's thread pool.
    """

    def __init__(self, cache_BLSH: torch.Tensor) -> None:
        """Read from `cache_BLSH`, a view of the engine's own memory."""
        self._words_BLSW = words_of(cache_BLSH)
        self._slots = cache_BLSH.shape[2]

    def begin_step(self) -> None:
        """Do nothing: `start` reads at once."""

    def start(self, requests: Sequence[Request]) -> list[Copy]:
        """Fill the slabs of `requests`, each in token order."""
        return [self._copy(block_ids, out_LTH) for block_ids, out_LTH in requests]

    def _copy(self, block_ids: Sequence[int], out_LTH: torch.Tensor) -> Copy:
        out_LTW = words_of(out_LTH)
        num_layers, num_tokens, _ = out_LTW.shape
        sums_LT = np.empty((num_layers, num_tokens), np.int64)
        for index, block in enumerate(block_ids):
            begin = index * self._slots
            end = min(begin + self._slots, num_tokens)
            for layer in range(num_layers):
                states_TW = self._words_BLSW[block, layer, : end - begin]
                np.copyto(out_LTW[layer, begin:end], states_TW)
                add_up(states_TW, sums_LT[layer, begin:end])
        return _Finished(sums_LT)
