"""The writer rows: our writer fed from its pool, against plain write() of the same bytes to the same folder.

Every row is what one core gives: two threads share it, each with a file of its own. Two rows have one thread.

Legend: L captured layers, T tokens, H hidden size.
"""

import os
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch

from benchmarks.dataset import HIDDEN_SIZE, LAYER_IDS, model_identity, write_unit
from benchmarks.report import RateTurn
from connector.pool import HostPool, Slab
from tests.support.plans import JOB, random_ids, write_plan
from tests.support.sums import token_sums

NUM_TOKENS = 512
SHAPE_LTH = (len(LAYER_IDS), NUM_TOKENS, HIDDEN_SIZE)
"""One row: what an 8B model gives for a short conversation."""

ROW_BYTES = len(LAYER_IDS) * NUM_TOKENS * HIDDEN_SIZE * 2
NUM_SLABS = 16
"""Rows in the pool; a file of more rows repeats them. Together far more than a CPU's cache holds."""

FILE_ROWS = 64
NUM_THREADS = 2
"""Files at once, as many as an engine has writer threads by default."""

ALONE = frozenset({"write-fsync-alone", "quarry-alone"})
"""The kinds that one thread writes by itself."""


class WriterBench:
    """Holds the states and writes them in any of `kinds`; every file is deleted after it was timed."""

    def __init__(self, folder: Path) -> None:
        """Fill a pool's slabs with random bfloat16 and seal the plans."""
        # The figure is of one core, which is what an engine leaves: torch may not take another.
        torch.set_num_threads(1)
        self._folder = folder
        # A state that comes again is the same token's, as it is in an engine.
        ids = random_ids([NUM_TOKENS] * NUM_SLABS)
        self._ids = [ids[row % NUM_SLABS] for row in range(FILE_ROWS)]
        for unit in range(NUM_THREADS):
            write_plan(folder, self._ids, unit=unit)
        self._pool = HostPool(NUM_SLABS * ROW_BYTES, pinned=False)
        self._slabs = [self._fill(seed) for seed in range(NUM_SLABS)]
        self._sums = [token_sums(self._states_LTH(slab)) for slab in self._slabs]
        self.kinds: dict[str, Callable[[int], None]] = {
            "write-fsync": lambda unit: self._plain(unit, durable=True),
            "quarry": self._quarry,
            "write-fsync-alone": lambda unit: self._plain(unit, durable=True),
            "quarry-alone": self._quarry,
            "write": lambda unit: self._plain(unit, durable=False),
        }

    def run(self, kind: str) -> RateTurn:
        """Write a file a thread; nothing that was written before is still on its way to the disk."""
        os.sync()
        attempts = self._folder / JOB / "attempts"
        attempts.mkdir(parents=True)
        files = 1 if kind in ALONE else NUM_THREADS
        with (
            _one_core(),
            ThreadPoolExecutor(files) as threads,
        ):
            wall, cpu = time.perf_counter(), time.process_time()
            list(threads.map(self.kinds[kind], range(files)))
            turn = RateTurn(
                time.perf_counter() - wall,
                time.process_time() - cpu,
                files * FILE_ROWS * ROW_BYTES,
            )
        shutil.rmtree(attempts)
        return turn

    def _fill(self, seed: int) -> Slab:
        slab = self._pool.acquire(ROW_BYTES)
        assert slab is not None, "the pool was made for these slabs"
        generator = torch.Generator().manual_seed(seed)
        self._states_LTH(slab).copy_(torch.randn(SHAPE_LTH, generator=generator))
        return slab

    def _states_LTH(self, slab: Slab) -> torch.Tensor:
        return self._pool.tensor(slab, torch.bfloat16, SHAPE_LTH)

    def _plain(self, unit: int, *, durable: bool) -> None:
        fd = os.open(self._folder / JOB / "attempts" / f"{unit}.bin", os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            for row in range(FILE_ROWS):
                slab = self._slabs[row % NUM_SLABS]
                left = self._states_LTH(slab).view(torch.uint8).reshape(-1).numpy().data
                while left:
                    left = left[os.write(fd, left) :]
            if durable:
                os.fsync(fd)
        finally:
            os.close(fd)

    def _quarry(self, unit: int) -> None:
        slabs = [row % NUM_SLABS for row in range(FILE_ROWS)]
        rows = ((self._states_LTH(self._slabs[slab]), self._sums[slab]) for slab in slabs)
        cached = NUM_SLABS * NUM_TOKENS
        write_unit(self._folder, model_identity(), self._ids, rows, unit=unit, cache_tokens=cached)


@contextmanager
def _one_core() -> Iterator[None]:
    """Keep this thread, and those that it starts, on one core until the block ends."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
