"""The reader against the speculators trainer's own on the same rows: `python -m benchmarks.reader --save`.

`QuarryDataset` against `ArrowDataset` on an export of the same rows, beside a plain read() of the shard: with
all files in the page cache, and with none. A row that is read is two tensors of its own: the auxiliary layers
side by side [T, A * H], and the last one [T, H]. Then epochs of speculators' own loader with one worker: from
its export, and in place as `quarry train speculators` has it. The trainer's package is what `make` installs
into `.cache/trainers`.

Legend: T tokens, A auxiliary layers, H hidden size.
"""

import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.dataset import LAYER_IDS, Shape, write_dataset
from benchmarks.harness import (
    command,
    command_line,
    keep,
    kept_rounds,
    positive,
    run_rounds,
    shuffled_rounds,
)
from benchmarks.machine import machine_facts
from benchmarks.report import RateTurn, rate_figures, rate_table
from benchmarks.trainers import TRAINERS
from service.artifacts.dataset_files import files_of
from service.export.formats.speculators import index_files
from service.export.options import Algorithm, ExportOptions, FormatName
from service.export.run import export
from service.export.saving import seal_missing
from service.export.source import open_dataset
from service.reader import QuarryDataset, Row
from service.reader.row import About

ROWS, ROUNDS = 48, 5
BASE, DIRECT = "speculators", "quarry, direct"
BATCH_ROWS = 16
"""Rows of a packed batch of 8,192 tokens, speculators' default, at this bench's mean length."""
BATCH_TOKENS = 8192
HUGE_PAGES = {"THP_MEM_ALLOC_ENABLE": "1"}
"""What `quarry train speculators` gives its loader workers."""
READ_BYTES = 2**24


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
    """Reads the rows of a dataset and of its export to speculators, one reader at a time, in any order."""

    def __init__(self, dataset: Path, exported: Path, shape: Shape) -> None:
        """Open both; the trainer's package must be importable."""
        from speculators.train.data import ArrowDataset

        self._shape = shape
        self._shards = sorted(dataset.glob("data/*/*.parquet"))
        self._exported = sorted(exported.glob("hidden_states/*"))
        self._theirs: Any = ArrowDataset(max_len=2**30, datapath=exported, on_missing="raise")
        cached = QuarryDataset(dataset, view=Sides(), direct=False)
        direct = QuarryDataset(dataset, view=Sides(), direct=True)
        self.kinds: dict[str, Callable[[Sequence[int]], None]] = {
            "read()": self._plain,
            "quarry": partial(_batches, cached.__getitem__),
            DIRECT: partial(_batches, direct.__getitem__),
            BASE: partial(_batches, self._speculators),
        }

    def run(self, kind: str, number: int, *, cold: bool) -> RateTurn:
        """Read every row once, from a page cache that holds none of it or all of it.

        The order of the rows is drawn by the round's `number`.
        """
        order = random.Random(number).sample(range(self._shape.num_rows), self._shape.num_rows)
        for file in self._exported if kind == BASE else self._shards:
            (_drop if cold else _read_through)(file)
        wall, cpu = time.perf_counter(), time.process_time()
        self.kinds[kind](order)
        return RateTurn(time.perf_counter() - wall, time.process_time() - cpu, self._shape.state_bytes)

    def _plain(self, order: Sequence[int]) -> None:
        for shard in self._shards:
            _read_through(shard)

    def _speculators(self, number: int) -> dict[str, torch.Tensor]:
        # Their tensors are views of a mapped file: nothing was read until it is asked for in one piece.
        return {name: tensor.contiguous() for name, tensor in self._theirs[number].items()}


class EpochBench:
    """Epochs of speculators' own loader with one worker process, all files in the page cache."""

    def __init__(self, dataset: Path, exported: Path, ids: Path, shape: Shape) -> None:
        """Write the ids of `quarry train speculators`; the trainer's packages must be importable."""
        from service.trainers.speculators import QuarryTransfer

        options = ExportOptions(FormatName.SPECULATORS, Algorithm.EAGLE3, LAYER_IDS[:-1])
        source = open_dataset(str(dataset), options)
        ids.mkdir()
        seal_missing(ids, index_files(source))
        shards = [entry for manifest in source.rows.manifests.values() for entry in manifest.shards]
        in_place = QuarryTransfer(files_of(dataset), shards, ids, options, check=False)
        self._shape = shape
        self._loaders = {
            BASE: _epochs(exported, None, shape, {}),
            "speculators, huge pages": _epochs(exported, None, shape, HUGE_PAGES),
            "quarry train": _epochs(ids, in_place, shape, HUGE_PAGES),
        }
        self.kinds = list(self._loaders)

    def run(self, kind: str, number: int) -> RateTurn:
        """Take every batch of an epoch; the CPU time is the worker's."""
        loader, worker = self._loaders[kind]
        wall, cpu = time.perf_counter(), sum(worker.cpu_times()[:2])
        for _ in loader:
            pass
        cpu = sum(worker.cpu_times()[:2]) - cpu
        return RateTurn(time.perf_counter() - wall, cpu, self._shape.state_bytes)


def _epochs(
    ids: Path,
    transfer: Any,  # noqa: ANN401 - of a package that is imported late
    shape: Shape,
    variables: dict[str, str],
) -> tuple[Any, psutil.Process]:
    """Return speculators' loader and its worker, started with these environment variables."""
    from speculators.models.eagle3.data import shift_batch
    from speculators.train.data import ArrowDataset
    from speculators.train.dataloader import _setup_dataloader

    rows = ArrowDataset(max_len=BATCH_TOKENS, datapath=ids, transfer=transfer, on_missing="raise")
    loader = _setup_dataloader(rows, BATCH_TOKENS, shape.hidden_size, num_workers=1, preprocess=shift_batch)
    os.environ.update(variables)
    iter(loader)
    for name in variables:
        del os.environ[name]
    return loader, psutil.Process(loader._iterator._workers[0].pid)


def _batches(read: Callable[[int], dict[str, torch.Tensor]], order: Sequence[int]) -> None:
    """Read rows, and let go of them a batch at a time, as a trainer does."""
    batch = []
    for number in order:
        batch.append(read(number))
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


def measure(folder: Path, shape: Shape, num_rounds: int, seed: int) -> dict[str, Any]:
    """Print the tables of the warm and the cold rounds, and return what is kept of each."""
    dataset, exported = folder / "dataset", folder / "exported"
    write_dataset(dataset, folder / "scratch", shape)
    export(str(dataset), exported, ExportOptions(FormatName.SPECULATORS, Algorithm.EAGLE3))
    bench = ReadBench(dataset, exported, shape)
    parts = {}
    for part in ("warm", "cold"):
        # What reads past the page cache is never warm.
        kinds = [kind for kind in bench.kinds if part == "cold" or kind != DIRECT]
        orders = shuffled_rounds(kinds, num_rounds, seed)
        turns = run_rounds(kinds, orders, partial(bench.run, cold=part == "cold"))
        figures = rate_figures(turns, dict.fromkeys(kinds, BASE))
        print("", rate_table(part, figures, {kind: kind for kind in kinds}, BASE), sep="\n")
        parts[part] = kept_rounds(orders, turns, figures)
    epochs = EpochBench(dataset, exported, folder / "ids", shape)
    orders = shuffled_rounds(epochs.kinds, num_rounds, seed)
    turns = run_rounds(epochs.kinds, orders, epochs.run)
    figures = rate_figures(turns, dict.fromkeys(epochs.kinds, BASE))
    print("", rate_table("epoch", figures, {kind: kind for kind in epochs.kinds}, BASE), sep="\n")
    return parts | {"epoch": kept_rounds(orders, turns, figures)}


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
    result = {
        "command": command("benchmarks.reader", options),
        "machine": facts | {"speculators": version("speculators")},
        "shape": asdict(shape) | {"state_bytes": shape.state_bytes},
        **parts,
    }
    keep(options.save, result)


if __name__ == "__main__":
    main()
