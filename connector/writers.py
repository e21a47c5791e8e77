"""The writer threads: each owns some of the open attempts, writes their rows and sends their receipts.

A unit stays on one thread for its life, so a file has one writer; units are assigned round-robin. An equal
number of encoder threads check and encode rows beforehand, also several of one unit; rows are written in the
order in which they arrived. Everything heavy (checks, encoding, hashing, writes, fsync) releases the GIL. A
failed attempt is reported to the service and forgotten; its later rows are dropped.
"""

import itertools
import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import pyarrow as pa
import torch

from connector.pool import HostPool, Slab
from connector.repeats import RepeatCheck
from connector.rowcheck import StatesWrongError
from connector.shards import EncodedRow, UnitWriter
from connector.sums import Sums
from connector.wire import DrainConfig, DrainJob, VoidRow
from schemas.dataset.errors import NO_SPACE
from schemas.receipts import (
    AbandonUnit,
    AttemptId,
    FailReason,
    FromConnector,
    OpenUnit,
    SkipRow,
    UnitFailed,
    UnitOpened,
)

logger = logging.getLogger(__name__)

QUEUE_ITEMS = 8192
"""Capacity of a writer thread's queue; a full queue blocks the engine's step."""


@dataclass(frozen=True, slots=True)
class CapturedRow:
    """A row in the pool: the slab of its states, and the sums of the states as read from the cache."""

    job: DrainJob
    slab: Slab
    states_LTH: torch.Tensor
    sums_LT: Sums


Item = OpenUnit | CapturedRow | VoidRow | SkipRow | AbandonUnit
"""What may be sent to an attempt."""

Encoding = Future[EncodedRow]

Queue = queue.Queue[tuple[AttemptId, Item, Encoding | None] | None]
"""Items with their attempts, and the encoding of a row; None ends the thread."""


class WriterPool:
    """Starts the threads; thread-safe.

    `send` sends a message to the service.
    """

    def __init__(
        self,
        config: DrainConfig,
        pool: HostPool,
        send: Callable[[FromConnector], None],
        repeats: RepeatCheck,
    ) -> None:
        self._config, self._rank, self._pool = config, config.rank, pool
        self._send, self._repeats = send, repeats
        self._queues = [Queue(QUEUE_ITEMS) for _ in range(config.writer_threads)]
        self._turn = itertools.cycle(self._queues)
        self._lock = threading.Lock()
        self._home: dict[AttemptId, Queue] = {}
        """The queue of each open attempt. An attempt that is not here is over."""
        self._units: dict[AttemptId, UnitWriter] = {}
        """The units of all threads. Only an attempt's own thread adds and removes it."""
        self._busy_ns = [0] * config.writer_threads
        """How long each thread has worked; only the thread itself adds to it."""
        self._encoders = ThreadPoolExecutor(
            config.writer_threads, "quarry-encoder", initializer=_begin_thread
        )
        self._threads = [
            threading.Thread(target=self._run, args=(index, own), name=f"quarry-writer-{index}", daemon=True)
            for index, own in enumerate(self._queues)
        ]
        for thread in self._threads:
            thread.start()

    def put(self, attempt_id: AttemptId, item: Item) -> None:
        """Hand an item to its attempt's thread; a new attempt is assigned the next thread in turn.

        The writer releases a row's slab. Items for an attempt that is over are dropped. Blocks only while the
        thread's queue of `QUEUE_ITEMS` is full.
        """
        with self._lock:
            if isinstance(item, OpenUnit):
                self._home[attempt_id] = next(self._turn)
            home = self._home.get(attempt_id)
            if isinstance(item, AbandonUnit):
                self._home.pop(attempt_id, None)
        if home is not None:
            unit, encoding = self._units.get(attempt_id), None
            if isinstance(item, CapturedRow) and unit is not None:
                encoding = self._encoders.submit(unit.encode, item.job, item.states_LTH, item.sums_LT)
            home.put((attempt_id, item, encoding))
        elif isinstance(item, CapturedRow):
            self._pool.release(item.slab)

    def is_open(self, attempt_id: AttemptId) -> bool:
        """Return whether rows of this attempt are still wanted."""
        with self._lock:
            return attempt_id in self._home

    def stop(self) -> None:
        """Finish what is queued, then end the threads."""
        for own in self._queues:
            own.put(None)
        for thread in self._threads:
            thread.join(timeout=30.0)
        self._encoders.shutdown(wait=False)

    @property
    def busy_s(self) -> float:
        """How long the threads have worked, all together."""
        return sum(self._busy_ns) / 1e9

    def _run(self, index: int, own: Queue) -> None:
        """Serve one thread's queue until None comes."""
        _begin_thread()
        while (entry := own.get()) is not None:
            begun_ns = time.monotonic_ns()
            attempt_id, item, encoding = entry
            try:
                self._serve(attempt_id, item, encoding)
            except (StatesWrongError, OSError, pa.ArrowException) as error:
                self._fail(attempt_id, error, opening=isinstance(item, OpenUnit))
            except Exception as error:
                # Supervisor: if a thread died silently, its units would never be answered.
                logger.exception("writer thread failed on %s", attempt_id)
                self._fail(attempt_id, error)
            finally:
                if encoding is not None and not encoding.cancel():
                    wait([encoding])  # it writes to the slab
                if isinstance(item, CapturedRow):
                    self._pool.release(item.slab)
                self._busy_ns[index] += time.monotonic_ns() - begun_ns
            del entry, item, encoding  # or the thread would keep the row until the next one comes
        for attempt_id in [one for one, home in list(self._home.items()) if home is own]:
            if (unit := self._units.pop(attempt_id, None)) is not None:
                unit.discard()

    def _serve(self, attempt_id: AttemptId, item: Item, encoding: Encoding | None) -> None:
        units = self._units
        if isinstance(item, OpenUnit):
            units[attempt_id] = UnitWriter(item, self._config, self._repeats)
            self._send(UnitOpened(attempt_id=attempt_id, rank=self._rank))
        elif attempt_id not in units:
            return
        elif isinstance(item, AbandonUnit):
            units.pop(attempt_id).discard()
            return
        elif isinstance(item, CapturedRow):
            if encoding is None:  # it arrived before its unit was open
                units[attempt_id].write(item.job, item.states_LTH, item.sums_LT)
            else:
                units[attempt_id].append(encoding.result())
        elif isinstance(item, VoidRow):
            units[attempt_id].void(item.ref.row)
        else:
            units[attempt_id].skip(item.row)
        if units[attempt_id].complete:
            receipt = units[attempt_id].seal()
            del units[attempt_id]
            self._close(attempt_id)
            self._send(receipt)

    def _fail(self, attempt_id: AttemptId, error: Exception, *, opening: bool = False) -> None:
        """Report a failed attempt.

        The disk may refuse the deletion, too; the sweeper removes what is left.
        """
        reason = _fail_reason(error, opening=opening)
        detail = repr(error) if reason == "internal" else str(error)
        unit = self._units.pop(attempt_id, None)
        self._close(attempt_id)
        if unit is not None:
            try:
                unit.discard()
            except OSError as refused:
                detail = f"{detail}; and {refused}"
        number = error.errno if isinstance(error, OSError) else None
        self._send(
            UnitFailed(attempt_id=attempt_id, rank=self._rank, reason=reason, detail=detail, errno=number)
        )

    def _close(self, attempt_id: AttemptId) -> None:
        with self._lock:
            self._home.pop(attempt_id, None)


def _begin_thread() -> None:
    """Let the calling thread run on every core of the parent process, and torch use no other thread in it.

    On a CPU, vLLM binds the thread that runs the model to one core before it builds the connector, and a
    thread inherits the affinity of the one that starts it: every writer would share the model's core. With a
    GPU nothing is bound. Torch would divide what a thread encodes among as many threads as there are cores.
    The thread that runs the model keeps its number, since it has computed with torch before; threads that
    first do so later get one, too.
    """
    # vLLM's worker on a CPU replaces `torch.set_num_threads` by a function that only logs a warning.
    torch._C.set_num_threads(1)
    os.sched_setaffinity(0, os.sched_getaffinity(os.getppid()))


def _fail_reason(error: Exception, *, opening: bool) -> FailReason:
    """Translate an error; pyarrow, too, raises OSError with errno for a full disk."""
    if isinstance(error, StatesWrongError):
        return "states-wrong"
    if not isinstance(error, OSError | pa.ArrowException):
        return "internal"
    full = isinstance(error, OSError) and error.errno in NO_SPACE
    return "plan-unreadable" if opening and not full else "write-failed"
