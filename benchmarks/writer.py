"""The writer rows: our writer fed from its pool, against plain write() of the same bytes to the same folder.

Legend: L captured layers, T tokens, H hidden size.
"""

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.turns import WriterTurn
from connector.pool import HostPool, Slab
from connector.shards import UnitWriter
from connector.wire import DrainJob, RowRef, hash_ids
from tests.support.plans import JOB, identity, order, random_ids, write_plan

NUM_LAYERS, NUM_TOKENS, HIDDEN_SIZE = 4, 512, 4096
SHAPE_LTH = (NUM_LAYERS, NUM_TOKENS, HIDDEN_SIZE)
"""One row: what an 8B model gives for a short conversation."""

ROW_BYTES = NUM_LAYERS * NUM_TOKENS * HIDDEN_SIZE * 2
NUM_SLABS = 16
"""Rows in the pool; a file of more rows repeats them. Together far more than a CPU's cache holds."""

LAYER_IDS = (2, 16, 29, 32)


class WriterBench:
    """Holds the states and writes them in any of `kinds`; every file is deleted after it was timed."""

    def __init__(self, folder: Path, num_rows: int) -> None:
        """Fill a pool's slabs with random bfloat16 and seal the plan; `num_rows` rows make a file."""
        # The figure is of one writer thread on one core, which is what an engine leaves it.
        torch.set_num_threads(1)
        self._folder, self._num_rows = folder, num_rows
        self._ids = random_ids([NUM_TOKENS] * num_rows)
        write_plan(folder, self._ids)
        self._pool = HostPool(NUM_SLABS * ROW_BYTES, pinned=False)
        self._slabs = [self._fill(seed) for seed in range(NUM_SLABS)]
        self.kinds: dict[str, Callable[[], WriterTurn]] = {
            "write-fsync": lambda: self._plain(durable=True),
            "quarry-sealed": lambda: self._quarry(durable=True),
            "write": lambda: self._plain(durable=False),
            "quarry-rows": lambda: self._quarry(durable=False),
        }

    def run(self, kind: str) -> WriterTurn:
        """Write one file; nothing that was written before is still on its way to the disk."""
        os.sync()
        return self.kinds[kind]()

    def _fill(self, seed: int) -> Slab:
        slab = self._pool.acquire(ROW_BYTES)
        assert slab is not None, "the pool was made for these slabs"
        generator = torch.Generator().manual_seed(seed)
        self._states_LTH(slab).copy_(torch.randn(SHAPE_LTH, generator=generator))
        return slab

    def _states_LTH(self, slab: Slab) -> torch.Tensor:
        return self._pool.tensor(slab, torch.bfloat16, SHAPE_LTH)

    def _plain(self, *, durable: bool) -> WriterTurn:
        path = self._folder / "plain.bin"
        clock = _Clock()
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            for row in range(self._num_rows):
                slab = self._slabs[row % NUM_SLABS]
                left = self._states_LTH(slab).view(torch.uint8).reshape(-1).numpy().data
                while left:
                    left = left[os.write(fd, left) :]
            if durable:
                os.fsync(fd)
        finally:
            os.close(fd)
        turn = clock.turn(self._num_rows * ROW_BYTES)
        path.unlink()
        return turn

    def _quarry(self, *, durable: bool) -> WriterTurn:
        about = identity(layer_ids=LAYER_IDS, hidden_size=HIDDEN_SIZE, num_layers=LAYER_IDS[-1])
        told = order(about, self._num_rows)
        clock = _Clock()
        writer = UnitWriter(told, self._folder, rank=0, num_ranks=1)
        for row, ids in enumerate(self._ids):
            job = DrainJob(
                req_id=str(row),
                ref=RowRef(told.key, row, NUM_TOKENS),
                num_tokens=NUM_TOKENS,
                block_ids=(),
                planned_hash=hash_ids(ids),
                generated_ids=(),
            )
            writer.write(job, self._states_LTH(self._slabs[row % NUM_SLABS]))
        if durable:
            writer.seal()
        turn = clock.turn(self._num_rows * ROW_BYTES)
        writer.discard()
        shutil.rmtree(self._folder / JOB / "attempts")
        return turn


class _Clock:
    """Wall and CPU time since it was made."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def turn(self, num_bytes: int) -> WriterTurn:
        return WriterTurn(time.perf_counter() - self._wall, time.process_time() - self._cpu, num_bytes)
