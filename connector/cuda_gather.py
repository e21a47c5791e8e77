"""Copies requests from the paged cache of a GPU into pinned slabs, on two streams of its own.

One stream gathers rows into a stage on the device, the other empties the stage into the slabs.

Legend: B blocks, L captured layers, S slots per block, H hidden size, T tokens of a request, R rows (one
token's state of one layer), W words of a state.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from connector.gather import Copy, Request
from connector.sums import Sums, word_type

STAGE_BYTES = 128 * 2**20
"""Device memory of the CUDA gather's stage, whatever the length of a request."""

PIECES = 2
"""How many pieces the stage is divided into: one is gathered while the other is copied out."""

NUMBER_BYTES = 8
"""Size of one row number, which is copied to the device."""


class RowTable:
    """Finds the rows of a request in a cache of any axis order, physical layout and padding.

    Row numbers are in units of the pitch: the greatest common divisor of the cache's strides.
    """

    def __init__(self, cache_BLSH: torch.Tensor) -> None:
        """Take `cache_BLSH`, a view of the engine's own memory; a row's H values must be contiguous."""
        *sizes, hidden_size = cache_BLSH.shape
        strides = cache_BLSH.stride()[:3]
        pitch = math.gcd(*strides)
        self._per_block, per_layer, per_slot = (stride // pitch for stride in strides)
        self._layers_L1 = np.arange(sizes[1], dtype=np.int64)[:, None] * per_layer
        self._slots_S = np.arange(sizes[2], dtype=np.int64) * per_slot
        last = sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True)) // pitch
        self.rows_RH = cache_BLSH.as_strided((last + 1, hidden_size), (pitch, 1))
        """The same memory, indexed by row number; rows overlap if the pitch is less than H."""

    def numbers(self, block_ids: Sequence[int], num_tokens: int) -> NDArray[np.int64]:
        """Return the numbers of a request's L * T rows, layer by layer and in token order."""
        blocks_B1 = np.asarray(block_ids, dtype=np.int64)[:, None] * self._per_block
        tokens_T = (blocks_B1 + self._slots_S).reshape(-1)[:num_tokens]
        return (self._layers_L1 + tokens_T).reshape(-1)


def cut_into_pieces(num_rows: Sequence[int], piece_rows: int) -> list[list[tuple[int, slice]]]:
    """Cut requests of `num_rows` each into pieces of `piece_rows`, in order; the last may be smaller.

    A piece lists (request number, slice of that request's rows). A request is cut only where a piece is full,
    to keep the number of copies minimal.
    """
    cut: list[list[tuple[int, slice]]] = []
    room = 0
    for request, rows in enumerate(num_rows):
        begin = 0
        while begin < rows:
            if room == 0:
                cut.append([])
                room = piece_rows
            end = min(rows, begin + room)
            cut[-1].append((request, slice(begin, end)))
            room -= end - begin
            begin = end
    return cut


class CudaGather:
    """Gathers rows into a stage on one stream and empties the stage on another.

    Rows of many requests are gathered at once: a large kernel of the model occupies the device until it ends,
    so little more than one gather fits between two of them. One piece is gathered into its half of the stage
    while the other is copied out. Neither the host nor the current stream waits for anything. A request
    allocates no device memory, and pinned memory only for the sums of its states: its row numbers travel
    through its own slab, ahead of its states.
    """

    def __init__(self, cache_BLSH: torch.Tensor, stage_bytes: int = STAGE_BYTES) -> None:
        """Allocate `stage_bytes` on the cache's device; no other device memory is ever used."""
        self._table = RowTable(cache_BLSH)
        self._device, self._hidden_size = cache_BLSH.device, cache_BLSH.shape[3]
        row_bytes = self._hidden_size * cache_BLSH.element_size()
        num_rows = max(PIECES, stage_bytes // (row_bytes + NUMBER_BYTES))
        self._stage_RH = torch.empty(
            (num_rows, self._hidden_size), dtype=cache_BLSH.dtype, device=self._device
        )
        self._words_RW = self._stage_RH.view(word_type(row_bytes))
        self._numbers_R = torch.empty(num_rows, dtype=torch.int64, device=self._device)
        """The numbers of the rows to gather; then the sums of the gathered states."""
        self._piece_rows = num_rows // PIECES
        self._place = 0
        self._emptied: list[torch.cuda.Event | None] = [None] * PIECES
        """For each piece of the stage, the event at the end of its last copy out; None before the first."""
        # The gather has the higher priority: it is short, and the copies wait for it.
        self._gathering = torch.cuda.Stream(self._device, priority=-1)
        self._copying = torch.cuda.Stream(self._device)
        self._written = torch.cuda.Event()
        self._gathered = torch.cuda.Event()

    def begin_step(self) -> None:
        """Record the current stream's position: this step's copies wait for that point and no later one.

        A request's states were enqueued in earlier steps than the one that copies them.
        """
        self._written.record(torch.cuda.current_stream(self._device))

    def start(self, requests: Sequence[Request]) -> list[Copy]:
        """Enqueue the copies of `requests` into their slabs, which are pinned and contiguous.

        They read what was enqueued before the last `begin_step`. Until a request's copy is done, its blocks
        must not be reused, and its slab belongs to the copy.
        """
        if not requests:
            return []
        current = torch.cuda.current_stream(self._device)
        self._gathering.wait_event(self._written)
        numbers_R = [torch.from_numpy(self._table.numbers(ids, out.shape[1])) for ids, out in requests]
        out_RH = [out_LTH.view(-1, self._hidden_size) for _, out_LTH in requests]
        sums_R = [torch.empty(len(numbers), dtype=torch.int64, pin_memory=True) for numbers in numbers_R]
        copies: list[Copy] = []
        try:
            for piece in cut_into_pieces([len(numbers) for numbers in numbers_R], self._piece_rows):
                copied = self._move(
                    [
                        (numbers_R[request][rows], out_RH[request][rows], sums_R[request][rows])
                        for request, rows in piece
                    ]
                )
                ended = [request for request, rows in piece if rows.stop == len(numbers_R[request])]
                copies += [_CudaCopy(copied, sums_R[one], len(requests[one][1])) for one in ended]
        finally:
            torch.cuda.set_stream(current)
        return copies

    def _move(self, parts: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> torch.cuda.Event:
        """Enqueue the copy of one piece; a part is (row numbers, destination, destination of the sums).

        Leaves another stream current; returns the event that marks the end of the copy.
        """
        self._place = (self._place + 1) % PIECES
        emptied = self._emptied[self._place]
        torch.cuda.set_stream(self._gathering)
        if emptied is not None:
            self._gathering.wait_event(emptied)
        begin = end = self._place * self._piece_rows
        stages = []
        for numbers_R, out_RH, _ in parts:
            pinned_R = out_RH.view(-1).view(torch.int64)[: len(numbers_R)].copy_(numbers_R)
            stages.append(slice(end, end + len(numbers_R)))
            self._numbers_R[stages[-1]].copy_(pinned_R, non_blocking=True)
            end += len(numbers_R)
        torch.index_select(self._table.rows_RH, 0, self._numbers_R[begin:end], out=self._stage_RH[begin:end])
        torch.sum(self._words_RW[begin:end], 1, out=self._numbers_R[begin:end])
        self._gathered.record(self._gathering)
        torch.cuda.set_stream(self._copying)
        self._copying.wait_event(self._gathered)
        for stage, (_, out_RH, sums_R) in zip(stages, parts, strict=True):
            out_RH.copy_(self._stage_RH[stage], non_blocking=True)
            sums_R.copy_(self._numbers_R[stage], non_blocking=True)
        copied = torch.cuda.Event()
        copied.record(self._copying)
        self._emptied[self._place] = copied
        return copied


class _CudaCopy:
    def __init__(self, event: torch.cuda.Event, sums_R: torch.Tensor, num_layers: int) -> None:
        self._event = event
        self._sums_LT = sums_R.view(num_layers, -1)

    def done(self) -> bool:
        return bool(self._event.query())

    def sums(self) -> Sums:
        return self._sums_LT.numpy()
