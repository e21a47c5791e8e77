"""The rows of the GPU benchmark, in cells of rows that are compared: what each turn of them runs."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from benchmarks.gpu_cache import LAYOUTS, TOKEN_BYTES, Request, random_requests, view_BLSH
from benchmarks.gpu_turns import (
    STEP_TOKENS,
    WARM_STEPS,
    Beside,
    GpuTurn,
    Model,
    drain_alone,
    drain_beside,
)
from benchmarks.gpu_ways import ExampleWay, PinnedWay, QuarryWay, Way
from connector.cuda_gather import STAGE_BYTES
from connector.pool import HostPool

if TYPE_CHECKING:
    from benchmarks.gpu_writers import Files

DRAIN_BYTES = 6 * 2**30
"""States of a turn that drains alone."""

FILE_BYTES = 2**30
"""States of a turn that writes."""

PIECE = Request((), 2048)
"""64 MiB: the copies that the link is measured with."""

FLAT_OUT = Beside(num_steps=40, num_products=3, pace=STEP_TOKENS)
"""So little arithmetic, about 4 ms a step, that the drain is the bound: 60 GB of states a second of it."""

AN_8B = Beside(num_steps=6, num_products=136, pace=STEP_TOKENS)
"""An 8B model's arithmetic: 16 GFLOP a token, 131 TFLOP a step of 8192 tokens."""

STAGES = tuple(size * 2**20 for size in (32, 64, 128, 256))

PINNED, QUARRY, EXAMPLE, MODEL = "pinned copy", "Quarry", "example", "model alone"


@dataclass(frozen=True)
class Row:
    """One way's work in every turn."""

    way: Way
    requests: list[Request]
    beside: Beside | None = None
    files: "Files | None" = None

    def run(self, model: Model) -> GpuTurn:
        """Run one turn; it lasts until all is on the host, or written, or the model's last step has ended."""
        if self.files is not None:
            self.files.prepare(self.requests)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        if self.beside is None:
            turn = drain_alone(self.way, self.requests)
        else:
            turn = drain_beside(self.way, self.requests, model, self.beside)
        if self.files is not None:
            self.files.finish()
            if self.beside is None:
                turn = replace(turn, seconds=time.perf_counter() - begin)
            self.files.clean()
        return turn


Cell = dict[str, Row]


class Rows:
    """Makes the cells over one cache and one pool."""

    def __init__(self, flat: torch.Tensor, pool: HostPool, seed: int) -> None:
        self._flat, self._pool, self._seed = flat, pool, seed
        self._num_blocks = len(view_BLSH(flat, LAYOUTS[0]))
        self._pinned = PinnedWay(pool, PIECE.num_bytes)

    def drain(self) -> Iterator[tuple[str, Cell]]:
        """Yield the cells that end in host memory."""
        for layout in LAYOUTS:
            cache = view_BLSH(self._flat, layout)
            ours, example = QuarryWay(cache, self._pool, STAGE_BYTES), ExampleWay(cache, None)
            for lengths in ("short", "typical", "long"):
                requests = self._requests(lengths, DRAIN_BYTES)
                yield (
                    f"{lengths}, {layout}, alone",
                    {
                        PINNED: self._link(None),
                        QUARRY: Row(ours, requests),
                        EXAMPLE: Row(example, requests),
                    },
                )
                yield (
                    f"{lengths}, {layout}, beside a model",
                    {
                        PINNED: self._link(FLAT_OUT),
                        MODEL: Row(ours, requests, replace(FLAT_OUT, pace=0)),
                        QUARRY: Row(ours, requests, FLAT_OUT),
                        EXAMPLE: Row(example, requests, FLAT_OUT),
                    },
                )

    def stages(self) -> Iterator[tuple[str, Cell]]:
        """Yield the cells that show what the size of the stage is worth."""
        requests = self._requests("typical", DRAIN_BYTES)
        cache = view_BLSH(self._flat, LAYOUTS[0])
        ways = {f"{size >> 20} MiB": QuarryWay(cache, self._pool, size) for size in STAGES}
        for name, beside in (("alone", None), ("beside a model", FLAT_OUT)):
            rows = {stage: Row(way, requests, beside) for stage, way in ways.items()}
            yield f"typical, {LAYOUTS[0]}, {name}", {PINNED: self._link(beside)} | rows

    def files(self, folders: dict[str, Path]) -> Iterator[tuple[str, Cell]]:
        """Yield the cells that end in files: flat out in each folder, and at a model's pace in the first."""
        from benchmarks.gpu_writers import ExampleFiles, PlainFiles, ShardFiles

        cache = view_BLSH(self._flat, LAYOUTS[0])
        requests = self._requests("typical", FILE_BYTES)
        for place, folder in folders.items():
            cell: Cell = {}
            plain = PlainFiles(folder / "plain", self._pool, num_threads=8)
            cell["write(), 8 threads"] = Row(plain, requests, files=plain)
            for num_threads in (2, 8):
                shards = ShardFiles(
                    folder, QuarryWay(cache, self._pool, STAGE_BYTES), self._pool, num_threads
                )
                cell[f"{QUARRY}, {num_threads} threads, sealed"] = Row(shards.way, requests, files=shards)
            example = ExampleFiles(folder / "example", cache)
            cell[f"{EXAMPLE}, 8 threads"] = Row(example.way, requests, files=example)
            yield f"typical, {place}", cell
            if folder == next(iter(folders.values())):
                yield f"an 8B model's pace, {place}", self._paced(cell)

    def _paced(self, flat_out: Cell) -> Cell:
        requests = self._requests("typical", (WARM_STEPS + AN_8B.num_steps) * STEP_TOKENS * TOKEN_BYTES)
        cache = view_BLSH(self._flat, LAYOUTS[0])
        ours, example = QuarryWay(cache, self._pool, STAGE_BYTES), ExampleWay(cache, None)
        cell = {
            MODEL: Row(ours, requests, replace(AN_8B, pace=0)),
            f"{QUARRY}, drain alone": Row(ours, requests, AN_8B),
            f"{EXAMPLE}, drain alone": Row(example, requests, AN_8B),
        }
        for name in (f"{QUARRY}, 2 threads, sealed", f"{EXAMPLE}, 8 threads"):
            cell[name] = replace(flat_out[name], requests=requests, beside=AN_8B)
        return cell

    def _link(self, beside: Beside | None) -> Row:
        return Row(self._pinned, [PIECE] * (DRAIN_BYTES // PIECE.num_bytes), beside)

    def _requests(self, lengths: str, num_bytes: int) -> list[Request]:
        return random_requests(lengths, num_bytes, self._num_blocks, self._seed)
