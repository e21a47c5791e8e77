"""Drained to files: the connector's writers, the example's files, and plain write() of the same bytes."""

import os
import queue
import shutil
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import torch

from benchmarks.gpu_cache import HIDDEN_SIZE, NUM_LAYERS, TOKEN_BYTES, Request, token_ids
from benchmarks.gpu_ways import POOL_BYTES, ExampleWay, QuarryWay, SlabFlight, Way
from connector.pool import HostPool, Slab
from connector.repeats import RepeatCheck
from connector.wire import DrainJob, RowRef, VoidRow, hash_ids
from connector.writers import CapturedRow, WriterPool
from schemas.receipts import FromConnector, OpenUnit, UnitFailed, UnitSealed
from tests.support.plans import JOB, identity, order, write_plan

LAYER_IDS = (2, 16, 29, 32)


class NotWritten(RuntimeError):
    """A turn whose files are not whole has no figure."""


class Files(Protocol):
    """A way whose requests end in files. A turn is `prepare`, a drain through `way`, `finish`, `clean`."""

    @property
    def way(self) -> Way:
        """The way that ends here."""

    def prepare(self, requests: list[Request]) -> None:
        """Make ready for `requests`, which come in this order."""

    def finish(self) -> None:
        """Wait until what was drained is written. Raises NotWritten."""

    def clean(self) -> None:
        """Delete the files."""


class ShardFiles:
    """The connector's writer threads behind its gather; one unit a thread. Finished when sealed."""

    def __init__(self, folder: Path, way: QuarryWay, pool: HostPool, num_threads: int) -> None:
        """Start `num_threads` writers that write below `folder` what `way` brings into `pool`."""
        self._folder, self._num_units = folder, num_threads
        self._about = identity(layer_ids=LAYER_IDS, hidden_size=HIDDEN_SIZE, num_layers=LAYER_IDS[-1])
        self._told = threading.Condition()
        self._ends: list[UnitSealed | UnitFailed] = []
        self._jobs: list[DrainJob] = []
        self._epoch = self._num_landed = 0
        self.way = way
        self._writers = WriterPool(
            num_threads=num_threads,
            work_root=folder,
            rank=0,
            num_ranks=1,
            pool=pool,
            send=self._tell,
            repeats=RepeatCheck(NUM_LAYERS, POOL_BYTES // TOKEN_BYTES),
        )

    def prepare(self, requests: list[Request]) -> None:
        """Plan the rows, spread over the units, and open them."""
        self._epoch += 1
        self._ends, self._num_landed = [], 0
        ids = [token_ids(request) for request in requests]
        orders: list[OpenUnit] = []
        for unit in range(self._num_units):
            rows = ids[unit :: self._num_units]
            write_plan(self._folder, rows, unit=unit)
            orders.append(order(self._about, len(rows), unit=unit, epoch=self._epoch))
            self._writers.put(orders[-1].key, orders[-1])
        self._jobs = [
            DrainJob(
                req_id=str(index),
                ref=RowRef(orders[index % self._num_units].key, index // self._num_units, len(row)),
                num_tokens=len(row),
                block_ids=request.block_ids,
                planned_hash=hash_ids(row),
                generated_ids=(),
            )
            for index, (request, row) in enumerate(zip(requests, ids, strict=True))
        ]
        self.way.on_end = self._landed

    def finish(self) -> None:
        """Call off what was not drained, and wait for every unit's receipt."""
        for job in self._jobs[self._num_landed :]:
            self._writers.put(job.ref.key, VoidRow(job.ref))
        with self._told:
            self._told.wait_for(lambda: len(self._ends) == self._num_units)
        num_rows = sum(len(end.rows) for end in self._ends if isinstance(end, UnitSealed))
        if num_rows != self._num_landed:
            raise NotWritten(f"{num_rows} of {self._num_landed} rows were sealed: {self._ends}")

    def clean(self) -> None:
        """Delete plans and shards."""
        shutil.rmtree(self._folder / JOB)

    def _landed(self, flight: SlabFlight) -> None:
        job = self._jobs[self._num_landed]
        self._writers.put(job.ref.key, CapturedRow(job, flight.slab, flight.states_LTH(), flight.sums_LT()))
        self._num_landed += 1

    def _tell(self, message: FromConnector) -> None:
        if isinstance(message, UnitSealed | UnitFailed):
            with self._told:
                self._ends.append(message)
                self._told.notify()


class ExampleFiles:
    """The example's way with its files. Finished when each was written; nothing is durable."""

    def __init__(self, folder: Path, cache_BLSH: torch.Tensor) -> None:
        self._folder = folder
        self.way = ExampleWay(cache_BLSH, folder)

    def prepare(self, requests: list[Request]) -> None:
        """Make the folder."""
        self._folder.mkdir(parents=True)

    def finish(self) -> None:
        """Wait for the writer threads."""
        for write in self.way.writes:
            write.result()
        self.way.writes.clear()

    def clean(self) -> None:
        """Delete the files."""
        shutil.rmtree(self._folder)


class PlainFiles:
    """write() alone of as many bytes, a file a thread: what the folder takes. Nothing is drained."""

    def __init__(self, folder: Path, pool: HostPool, num_threads: int) -> None:
        self._folder, self._pool, self._num_threads = folder, pool, num_threads
        self._threads = ThreadPoolExecutor(num_threads)
        self._files: queue.Queue[int] = queue.Queue(num_threads)
        self.way = self

    def prepare(self, requests: list[Request]) -> None:
        """Open the files."""
        self._folder.mkdir(parents=True)
        for thread in range(self._num_threads):
            self._files.put(os.open(self._folder / str(thread), os.O_WRONLY | os.O_CREAT, 0o600))

    def start(self, requests: Sequence[Request]) -> "list[PlainFlight]":
        """Write slabs as they lie."""
        flights: list[PlainFlight] = []
        for request in requests:
            slab = self._pool.acquire(request.num_bytes)
            if slab is None:
                break
            flights.append(PlainFlight(self._pool, slab, request, self._threads, self._write))
        return flights

    def finish(self) -> None:
        """Close the files."""
        for _ in range(self._num_threads):
            os.close(self._files.get())

    def clean(self) -> None:
        """Delete the files."""
        shutil.rmtree(self._folder)

    def _write(self, slab: Slab) -> None:
        fd = self._files.get()
        left = self._pool.tensor(slab, torch.uint8, (slab.num_bytes,)).numpy().data
        while left:
            left = left[os.write(fd, left) :]
        self._files.put(fd)


class PlainFlight:
    """A slab on its way to a file."""

    def __init__(
        self,
        pool: HostPool,
        slab: Slab,
        request: Request,
        threads: ThreadPoolExecutor,
        write: Callable[[Slab], None],
    ) -> None:
        self.request = request
        self._pool, self._slab = pool, slab
        self._written = threads.submit(write, slab)

    def done(self) -> bool:
        """Say whether it was written; what went wrong is raised here."""
        return self._written.done() and self._written.result() is None

    def states_LTH(self) -> torch.Tensor:
        """Return what was written: the pool's bytes, whatever they are."""
        return self._pool.tensor(self._slab, torch.uint8, (self._slab.num_bytes,))

    def end(self) -> None:
        """Release the slab."""
        self._pool.release(self._slab)
