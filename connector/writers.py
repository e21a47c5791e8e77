"""The writer threads: each owns some of the open attempts, writes their rows and receipts them.

A unit stays on one thread for its life, so a file has one writer; threads take units in turn. Everything
heavy (Parquet, hashing, fsync) releases the GIL. An attempt that fails is receipted as failed and forgotten;
its later rows are dropped.
"""

import itertools
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

from connector.pool import HostPool, Slab
from connector.repeats import RepeatCheck
from connector.rowcheck import StatesWrongError
from connector.shards import UnitWriter
from connector.sums import Sums
from connector.threads import settle
from connector.wire import DrainJob
from schemas.dataset.errors import NO_SPACE
from schemas.receipts import (
    FromConnector,
    OpenUnit,
    UnitFailed,
    UnitKey,
    UnitOpened,
)

logger = logging.getLogger(__name__)

QUEUE_ITEMS = 8192
"""Entries a writer thread may have waiting; a full queue leaves requests ungathered, like a full pool."""


@dataclass(frozen=True, slots=True)
class _Row:
    """`sums_LT` are the sums of the states where the copy was read."""

    job: DrainJob
    slab: Slab
    sums_LT: Sums


@dataclass(frozen=True, slots=True)
class _Ended:
    """A row that will not be written: void in the engine, or never submitted."""

    key: UnitKey
    row: int
    void: bool


@dataclass(frozen=True, slots=True)
class _Abandon:
    key: UnitKey


_Item = OpenUnit | _Row | _Ended | _Abandon | None


class WriterPool:
    """Starts the threads; every method may be called from any thread and none blocks.

    `send` sends a message to the service; `shape` is the slab's (L, H) and `dtype` the states'.
    """

    def __init__(
        self,
        *,
        num_threads: int,
        work_root: Path,
        rank: int,
        num_ranks: int,
        pool: HostPool,
        dtype: torch.dtype,
        shape_LH: tuple[int, int],
        send: Callable[[FromConnector], None],
        repeats: RepeatCheck,
    ) -> None:
        """Start the threads."""
        self._repeats = repeats
        self._work_root, self._rank, self._num_ranks = work_root, rank, num_ranks
        self._pool, self._dtype, self._shape_LH, self._send = pool, dtype, shape_LH, send
        self._queues: list[queue.Queue[_Item]] = [queue.Queue(QUEUE_ITEMS) for _ in range(num_threads)]
        self._turn = itertools.cycle(range(num_threads))
        self._lock = threading.Lock()
        self._home: dict[UnitKey, int] = {}
        """Which thread owns an open attempt. An attempt that is not here is over.

        What still comes for it is dropped.
        """
        self._threads = [
            threading.Thread(target=self._run, args=(own,), name=f"quarry-writer-{index}", daemon=True)
            for index, own in enumerate(self._queues)
        ]
        for thread in self._threads:
            thread.start()

    def open(self, order: OpenUnit) -> None:
        """Begin an attempt on the next thread in turn."""
        with self._lock:
            self._home[order.key] = home = next(self._turn)
        self._queues[home].put(order)

    def is_open(self, key: UnitKey) -> bool:
        """Say whether rows of this attempt are still wanted."""
        with self._lock:
            return key in self._home

    def put_row(self, job: DrainJob, slab: Slab, sums_LT: Sums) -> None:
        """Hand over a filled slab with the sums of what it was filled from; the writer releases it.

        Waits only if the queue of `QUEUE_ITEMS` is full.
        """
        home = self._home_of(job.ref.key)
        if home is None:
            self._pool.release(slab)
        else:
            self._queues[home].put(_Row(job, slab, sums_LT))

    def end_row(self, key: UnitKey, row: int, *, void: bool) -> None:
        """Note a row that will not be written."""
        home = self._home_of(key)
        if home is not None:
            self._queues[home].put(_Ended(key, row, void))

    def abandon(self, key: UnitKey) -> None:
        """Forget an attempt and delete its temporary file; no answer."""
        with self._lock:
            home = self._home.pop(key, None)
        if home is not None:
            self._queues[home].put(_Abandon(key))

    def stop(self) -> None:
        """Let the threads end after what is queued."""
        for own in self._queues:
            own.put(None)
        for thread in self._threads:
            thread.join(timeout=30.0)

    def _home_of(self, key: UnitKey) -> int | None:
        with self._lock:
            return self._home.get(key)

    def _run(self, own: "queue.Queue[_Item]") -> None:
        """Serve one thread's queue until None comes."""
        settle()
        units: dict[UnitKey, UnitWriter] = {}
        while (item := own.get()) is not None:
            key = item.job.ref.key if isinstance(item, _Row) else item.key
            try:
                self._serve(units, key, item)
            except StatesWrongError as error:
                self._fail(
                    units, key, UnitFailed(key=key, rank=self._rank, reason="states-wrong", detail=str(error))
                )
            except (OSError, pa.ArrowException) as error:
                self._fail(
                    units, key, _write_failure(key, self._rank, error, opening=isinstance(item, OpenUnit))
                )
            except Exception as error:
                # Supervisor: a thread that died silently would leave its units unanswered forever.
                logger.exception("writer thread failed on %s", key)
                self._fail(
                    units, key, UnitFailed(key=key, rank=self._rank, reason="internal", detail=repr(error))
                )
            finally:
                if isinstance(item, _Row):
                    self._pool.release(item.slab)
        for unit in units.values():
            unit.discard()

    def _serve(
        self, units: dict[UnitKey, UnitWriter], key: UnitKey, item: OpenUnit | _Row | _Ended | _Abandon
    ) -> None:
        if isinstance(item, OpenUnit):
            units[key] = UnitWriter(item, self._work_root, self._rank, self._num_ranks)
            self._send(UnitOpened(key=key, rank=self._rank))
        elif isinstance(item, _Abandon):
            if key in units:
                units.pop(key).discard()
            return
        elif key not in units:
            return
        elif isinstance(item, _Row):
            self._write(units[key], item)
        elif item.void:
            units[key].void(item.row)
        else:
            units[key].skip(item.row)
        if units[key].complete:
            receipt = units[key].seal()
            del units[key]
            self._close(key)
            self._send(receipt)

    def _write(self, unit: UnitWriter, row: _Row) -> None:
        """Write a row that is still what was copied, and compare its states with those of other rows."""
        num_layers, hidden_size = self._shape_LH
        states_LTH = self._pool.tensor(row.slab, self._dtype, (num_layers, row.job.num_tokens, hidden_size))
        look = unit.look(states_LTH)
        _refuse_changed(row, look.sums_LT, unit.layer_ids)
        token_ids_T = unit.write(row.job, states_LTH, look)
        if token_ids_T is not None:
            self._repeats.check(look.sums_LT, token_ids_T, unit.layer_ids)

    def _fail(self, units: dict[UnitKey, UnitWriter], key: UnitKey, failure: UnitFailed) -> None:
        """Receipt a failed attempt.

        The disk may refuse the deletion too, and the sweeper takes what is left.
        """
        unit = units.pop(key, None)
        self._close(key)
        if unit is not None:
            try:
                unit.discard()
            except OSError as error:
                failure = failure.model_copy(update={"detail": f"{failure.detail}; and {error}"})
        self._send(failure)

    def _close(self, key: UnitKey) -> None:
        with self._lock:
            self._home.pop(key, None)


def _refuse_changed(row: _Row, sums_LT: Sums, layer_ids: Sequence[int]) -> None:
    """Raise StatesWrongError if states in the slab are no longer those that were copied into it."""
    changed = np.argwhere(sums_LT != row.sums_LT)
    if len(changed):
        layer, token = changed[0]
        where = f"{len(changed)} of {sums_LT.size}, the first at token {token} of layer {layer_ids[layer]}"
        raise StatesWrongError(f"row {row.job.ref.row}: states are no longer what was copied: {where}")


def _write_failure(key: UnitKey, rank: int, error: Exception, *, opening: bool) -> UnitFailed:
    """Translate an error of the file system. pyarrow raises OSError with errno for a full disk."""
    number = error.errno if isinstance(error, OSError) else None
    if opening and number not in NO_SPACE:
        return UnitFailed(key=key, rank=rank, reason="plan-unreadable", detail=str(error), errno=number)
    return UnitFailed(key=key, rank=rank, reason="write-failed", detail=str(error), errno=number)
