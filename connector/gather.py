"""Copies a request's states from paged blocks into a host slab, layer by layer contiguous.

The only copy on the host side.

Legend: B blocks, L captured layers, S slots a block, H hidden size, T tokens of the request, R rows (one
token's states of one layer), W words of a state.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from connector.pieces import pieces
from connector.ring import Ring
from connector.rowtable import RowTable
from connector.sums import Sums, add_up, word_type, words_of

STAGE_BYTES = 128 * 2**20
"""Device memory that the CUDA gather stages through, whatever the length of a request."""

PIECES = 2
"""Into which the stage is divided: one is gathered while the other is copied out."""

NUMBER_BYTES = 8
"""A row's number on its way to the device."""

Request = tuple[Sequence[int], torch.Tensor]
"""The blocks of a request in token order, and its slab as `[L, T, H]`."""


class Copy(Protocol):
    """A copy under way."""

    def done(self) -> bool:
        """Say whether the slab holds all its bytes; never blocks."""

    def sums(self) -> Sums:
        """Return the sums [L, T] of the states where they were read, once the copy is done."""


class _Finished:
    def __init__(self, sums_LT: Sums) -> None:
        self._sums_LT = sums_LT

    def done(self) -> bool:
        return True

    def sums(self) -> Sums:
        return self._sums_LT


class CpuGather:
    """Copies on the calling thread, a block of a layer at a time, and sums what is still in the core's cache.

    By numpy, which moves a block as one piece of memory: torch takes ten times as long over the same strides,
    and calls the model's team of threads for it.
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


class CudaGather:
    """Copies on two streams of its own: one gathers rows into a stage on the device, the other empties it.

    Rows of many requests are gathered at once: a large kernel of the model leaves no room on the device until
    it ends, so that little more than one gather gets in between two of them. The stage is a ring, so that one
    piece is gathered while another is copied out. Neither the host nor the current stream waits for
    anything. A request allocates no device memory, and pinned memory only for the sums of its states: its row
    numbers travel through its own slab, ahead of its states.
    """

    def __init__(self, cache_BLSH: torch.Tensor, stage_bytes: int = STAGE_BYTES) -> None:
        """Allocate `stage_bytes` on the cache's device: all the device memory that is ever used."""
        self._table = RowTable(cache_BLSH)
        self._device, self._hidden_size = cache_BLSH.device, cache_BLSH.shape[3]
        row_bytes = self._hidden_size * cache_BLSH.element_size()
        num_rows = max(PIECES, stage_bytes // (row_bytes + NUMBER_BYTES))
        self._stage_RH = torch.empty(
            (num_rows, self._hidden_size), dtype=cache_BLSH.dtype, device=self._device
        )
        self._words_RW = self._stage_RH.view(word_type(row_bytes))
        self._numbers_R = torch.empty(num_rows, dtype=torch.int64, device=self._device)
        """Of the rows to gather; then the sums of what was gathered."""
        self._ring: Ring[torch.cuda.Event] = Ring(num_rows)
        self._piece_rows = num_rows // PIECES
        # Of what waits for the device, the gather goes first: it is short, and much waits for it.
        self._gathering = torch.cuda.Stream(self._device, priority=-1)  # type: ignore[no-untyped-call]
        self._copying = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._written = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._gathered = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def begin_step(self) -> None:
        """Note what the current stream holds now: the copies of this step wait for that, and for no more.

        The states of a request were enqueued in the steps before the one that brings its copy.
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
            for piece in pieces([len(numbers) for numbers in numbers_R], self._piece_rows):
                copied = self._move(
                    [
                        tuple(rows[part.request][part.rows] for rows in (numbers_R, out_RH, sums_R))
                        for part in piece
                    ]
                )
                ended = [part.request for part in piece if part.last]
                copies += [_CudaCopy(copied, sums_R[one], len(requests[one][1])) for one in ended]
        finally:
            torch.cuda.set_stream(current)
        return copies

    def _move(self, parts: list[tuple[torch.Tensor, ...]]) -> torch.cuda.Event:
        """Enqueue the copy of parts: the numbers of rows, where they go, and where their sums go; one piece.

        Leaves another stream current; returns the event of the copy's end.
        """
        begin, emptied = self._ring.take(sum(len(numbers_R) for numbers_R, *_ in parts))
        torch.cuda.set_stream(self._gathering)
        if emptied is not None:
            self._gathering.wait_event(emptied)
        end = begin
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
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record(self._copying)
        self._ring.hold(copied)
        return copied


class _CudaCopy:
    def __init__(self, event: torch.cuda.Event, sums_R: torch.Tensor, num_layers: int) -> None:
        self._event = event
        self._sums_LT = sums_R.view(num_layers, -1)

    def done(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def sums(self) -> Sums:
        return self._sums_LT.numpy()


def gather_for(cache_BLSH: torch.Tensor) -> CpuGather | CudaGather:
    """Return the gather for the device that the cache lies on."""
    return CudaGather(cache_BLSH) if cache_BLSH.is_cuda else CpuGather(cache_BLSH)
