"""The reader against the speculators trainer's own on the same rows: `python -m benchmarks.reader --save`.

`QuarryDataset` against `ArrowDataset` on an export of the same rows, beside a plain read() of the shard: with
all files in the page cache, and with none; one row after another, and by two threads. A row that is read is
two tensors of its own: the auxiliary layers side by side [T, A * H], and the last one [T, H]. The trainer's
package is what `make` installs into `.cache/trainers`.

Legend: T tokens, A auxiliary layers, H hidden size.
"""

import os
import random
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from benchmarks.dataset import Shape, write_dataset
from benchmarks.harness import (
    Spread,
    command,
    command_line,
    keep,
    markdown,
    paired,
    positive,
    run_rounds,
    shuffled_rounds,
    spread,
)
from benchmarks.machine import machine_facts
from benchmarks.trainers import TRAINERS
from service.export.options import Algorithm, ExportOptions, FormatName
from service.export.run import export
from service.reader import QuarryDataset, Row
from service.reader.row import About

ROWS, ROUNDS = 48, 5
BASE = "speculators"
BATCH_ROWS = 16
"""Rows of a packed batch of 8,192 tokens, speculators' default, at this bench's mean length."""
READ_BYTES = 2**24

Read = Callable[[int], dict[str, torch.Tensor]]
"""From a row's number to its tensors."""


@dataclass(frozen=True, slots=True)
class Turn:
    """Wall and CPU seconds of one turn."""

    seconds: float
    cpu_s: float


class Sides:
    """The view of a row whose states are read: auxiliary layers and last, the latter before the norm."""

    def check(self, about: About) -> None:
        """Every dataset of the bench has both."""

    def __call__(self, row: Row) -> dict[str, torch.Tensor]:
        """Return what speculators' dataset returns of a row, but for lengths and positions."""
        return {
            "input_ids": row.input_ids,
            "loss_mask": row.loss_mask,
            "hidden_states": row.auxiliary(),
            "verifier_last_hidden_states": row.last(),
        }


class ReadBench:
    """Reads the rows of a dataset and of its export to speculators, one reader at a time, in any order.

    A row stays in memory until the batch of `BATCH_ROWS` that it belongs to is whole, as a trainer's does.
    """

    def __init__(self, dataset: Path, exported: Path) -> None:
        """Open both; the trainer's package must be importable."""
        from speculators.train.data import ArrowDataset

        self._shards = sorted(dataset.glob("data/*/*.parquet"))
        self._exported = sorted(exported.glob("hidden_states/*"))
        self._theirs: Any = ArrowDataset(max_len=2**30, datapath=exported, on_missing="raise")
        cached = QuarryDataset(dataset, view=Sides(), direct=False)
        direct = QuarryDataset(dataset, view=Sides(), direct=True)
        self._num_rows = len(cached)
        readers: dict[str, Read] = {
            "quarry": cached.__getitem__,
            "quarry, direct": direct.__getitem__,
            BASE: self._speculators,
        }
        self._kinds: dict[str, Callable[[Sequence[int]], None]] = {"read()": self._plain}
        for name, read in readers.items():
            self._kinds[name] = partial(_one_by_one, read)
            self._kinds[f"{name}, 2 threads"] = partial(_two_threads, read)

    def kinds(self, *, cold: bool) -> list[str]:
        """Return what is compared; what reads past the page cache is never warm."""
        return [kind for kind in self._kinds if cold or "direct" not in kind]

    def run(self, kind: str, draw: random.Random, *, cold: bool) -> Turn:
        """Read every row once in any order, from a page cache that holds none of it or all of it."""
        order = draw.sample(range(self._num_rows), self._num_rows)
        for file in self._exported if kind.startswith(BASE) else self._shards:
            (_drop if cold else _read_through)(file)
        wall, cpu = time.perf_counter(), time.process_time()
        self._kinds[kind](order)
        return Turn(time.perf_counter() - wall, time.process_time() - cpu)

    def _plain(self, order: Sequence[int]) -> None:
        for shard in self._shards:
            _read_through(shard)

    def _speculators(self, number: int) -> dict[str, torch.Tensor]:
        # Their tensors are views of a mapped file: nothing was read until it is asked for in one piece.
        return {name: tensor.contiguous() for name, tensor in self._theirs[number].items()}


def _one_by_one(read: Read, order: Sequence[int]) -> None:
    _batches(map(read, order))


def _two_threads(read: Read, order: Sequence[int]) -> None:
    """Read as `QuarryStream` does: the next two rows while one is in use."""
    with ThreadPoolExecutor(2) as pool:
        _batches(_ahead(pool, read, order))


def _ahead(pool: Executor, read: Read, order: Sequence[int]) -> Iterator[dict[str, torch.Tensor]]:
    coming: deque[Future[dict[str, torch.Tensor]]] = deque()
    for number in order:
        coming.append(pool.submit(read, number))
        if len(coming) > 2:
            yield coming.popleft().result()
    while coming:
        yield coming.popleft().result()


def _batches(rows: Iterable[dict[str, torch.Tensor]]) -> None:
    """Take all rows, and let go of them a batch at a time."""
    batch = []
    for row in rows:
        batch.append(row)
        if len(batch) == BATCH_ROWS:
            batch.clear()


def _drop(file: Path) -> None:
    """Let the page cache forget a file; dirty pages would stay, so they are written first."""
    fd = os.open(file, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def _read_through(file: Path) -> None:
    buffer = bytearray(READ_BYTES)
    with file.open("rb", buffering=0) as opened:
        while opened.readinto(buffer):
            pass


def measure(folder: Path, shape: Shape, num_rounds: int, seed: int) -> dict[str, dict[str, list[Turn]]]:
    """Return the turns of the warm and the cold rounds."""
    dataset, exported = folder / "dataset", folder / "exported"
    write_dataset(dataset, folder / "scratch", shape)
    export(str(dataset), exported, ExportOptions(FormatName.SPECULATORS, Algorithm.EAGLE3))
    bench, draw = ReadBench(dataset, exported), random.Random(seed)

    def rounds(*, cold: bool) -> dict[str, list[Turn]]:
        kinds = bench.kinds(cold=cold)
        orders = shuffled_rounds(kinds, num_rounds, seed)
        return run_rounds(kinds, orders, lambda kind, _: bench.run(kind, draw, cold=cold))

    return {"warm": rounds(cold=False), "cold": rounds(cold=True)}


@dataclass(frozen=True, slots=True)
class Figures:
    """One kind over all rounds; the ratio is to speculators' rate in the same round."""

    gb_per_s: Spread
    rows_per_s: Spread
    cpu_s_per_gb: Spread
    ratio_to_speculators: Spread


def figures(turns: Mapping[str, Sequence[Turn]], shape: Shape) -> dict[str, Figures]:
    """Sum up the rounds of every kind."""
    gigabytes = shape.state_bytes / 1e9
    rates = {kind: [gigabytes / turn.seconds for turn in of_kind] for kind, of_kind in turns.items()}
    return {
        kind: Figures(
            gb_per_s=spread(rates[kind]),
            rows_per_s=spread(shape.num_rows / turn.seconds for turn in of_kind),
            cpu_s_per_gb=spread(turn.cpu_s / gigabytes for turn in of_kind),
            ratio_to_speculators=paired(rates[kind], rates[BASE]),
        )
        for kind, of_kind in turns.items()
    }


def table(part: str, kinds: Mapping[str, Figures]) -> str:
    """Return the table of the warm or the cold rounds."""
    rows = [
        [kind, str(one.gb_per_s), str(one.cpu_s_per_gb), str(one.ratio_to_speculators)]
        for kind, one in kinds.items()
    ]
    return markdown([part, "GB/s", "CPU s/GB", f"times {BASE}"], rows)


def main() -> None:
    """Measure, print the tables, keep every turn if asked to."""
    parser = command_line("benchmarks.reader", __doc__, save="reader", rounds=ROUNDS)
    parser.add_argument("--rows", type=positive, default=ROWS, help="rows of the dataset that is read")
    parser.add_argument("--dir", type=Path, help="where to write some 3 GB; default: the temporary folder")
    options = parser.parse_args()
    sys.path.append(str(TRAINERS))
    torch.set_num_threads(1)
    shape = Shape(options.rows)
    with tempfile.TemporaryDirectory(prefix="quarry-reader-", dir=options.dir) as folder:
        facts = machine_facts(Path(folder))
        parts = measure(Path(folder), shape, options.rounds, options.seed)
    summed_up = {part: figures(turns, shape) for part, turns in parts.items()}
    print("\n\n".join(table(part, kinds) for part, kinds in summed_up.items()))
    result = {
        "command": command("benchmarks.reader", options),
        "machine": facts | {"speculators": version("speculators")},
        "seed": options.seed,
        "shapes": {part: asdict(shape) | {"state_bytes": shape.state_bytes} for part in parts},
        "figures": {
            part: {kind: asdict(one) for kind, one in kinds.items()} for part, kinds in summed_up.items()
        },
        "turns": {
            part: {kind: [asdict(turn) for turn in some] for kind, some in turns.items()}
            for part, turns in parts.items()
        },
    }
    keep(options.save, result)


if __name__ == "__main__":
    main()
