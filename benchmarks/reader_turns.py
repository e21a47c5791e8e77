"""What one turn of the reader bench does: read every row once, or write every row once.

A row that is read ends as two tensors of its own: the auxiliary layers side by side [T, A * H], and the last
one [T, H]. Legend: T tokens, A auxiliary layers, H hidden size.
"""

import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from schemas.dataset.seal import sealing
from service.export.options import Algorithm, ExportOptions, FormatName
from service.export.run import export
from service.reader import QuarryDataset, Row
from service.reader.row import About

BATCH_ROWS = 16
"""Rows of a packed batch of 8,192 tokens, speculators' default, at this bench's mean length."""

_COPY_BYTES = 2**24


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
        rows = QuarryDataset(dataset, view=Sides(), direct=False)
        direct = QuarryDataset(dataset, view=Sides(), direct=True)
        self._num_rows = len(rows)
        self._kinds: dict[str, Callable[[Sequence[int]], None]] = {
            "read()": self._plain,
            "quarry": lambda order: _batches(map(rows.__getitem__, order)),
            "quarry, 2 threads": lambda order: _batches(_ahead(rows.__getitem__, order)),
            "quarry, direct": lambda order: _batches(map(direct.__getitem__, order)),
            "quarry, direct, 2 threads": lambda order: _batches(_ahead(direct.__getitem__, order)),
            "speculators": lambda order: _batches(map(self._speculators, order)),
            "speculators, 2 threads": lambda order: _batches(_ahead(self._speculators, order)),
        }

    def __len__(self) -> int:
        return self._num_rows

    def kinds(self, *, cold: bool) -> list[str]:
        """Return what is compared; what reads past the page cache is never warm."""
        return [kind for kind in self._kinds if cold or "direct" not in kind]

    def run(self, kind: str, order: Sequence[int], *, cold: bool) -> Turn:
        """Read every row once in `order`, from a page cache that holds none of it or all of it."""
        for file in self._exported if kind.startswith("speculators") else self._shards:
            (_drop if cold else _read_through)(file)
        with _clock() as turn:
            self._kinds[kind](order)
        return turn()

    def _plain(self, order: Sequence[int]) -> None:
        for shard in self._shards:
            _read_through(shard)

    def _speculators(self, number: int) -> dict[str, torch.Tensor]:
        # Their tensors are views of a mapped file: nothing was read until it is asked for in one piece.
        return {name: tensor.contiguous() for name, tensor in self._theirs[number].items()}


def _batches(rows: Iterable[dict[str, torch.Tensor]]) -> None:
    """Take all rows, and let go of them a batch at a time."""
    batch = []
    for row in rows:
        batch.append(row)
        if len(batch) == BATCH_ROWS:
            batch.clear()


def _ahead(
    read: Callable[[int], dict[str, torch.Tensor]], order: Sequence[int]
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield rows in order, read by two threads as `QuarryStream` does: the next two while one is in use."""
    coming: deque[Future[dict[str, torch.Tensor]]] = deque()
    with ThreadPoolExecutor(2) as pool:
        for number in order:
            coming.append(pool.submit(read, number))
            if len(coming) > 2:
                yield coming.popleft().result()
        while coming:
            yield coming.popleft().result()


class ExportBench:
    """Exports a dataset in any of `kinds`, beside a copy of the same states; what was written is deleted."""

    def __init__(self, dataset: Path, scratch: Path) -> None:
        """Write below `scratch`, on the file system of the dataset."""
        self._dataset, self._out = dataset, scratch / "out"
        self.kinds: dict[str, Callable[[], None]] = {
            "copy": self._copy,
            "speculators": lambda: self._export(FormatName.SPECULATORS),
            "specforge": lambda: self._export(FormatName.SPECFORGE),
            "deepspec": lambda: self._export(FormatName.DEEPSPEC),
        }

    def run(self, kind: str) -> Turn:
        """Write everything once; nothing that was written before is still on its way to the disk."""
        os.sync()
        for shard in self._dataset.glob("data/*/*.parquet"):
            _read_through(shard)
        with _clock() as turn:
            self.kinds[kind]()
        shutil.rmtree(self._out)
        return turn()

    def _copy(self) -> None:
        for shard in self._dataset.glob("data/*/*.parquet"):
            with sealing(self._out / shard.name) as temporary:
                shutil.copyfile(shard, temporary)

    def _export(self, to: FormatName) -> None:
        algorithm = Algorithm.DSPARK if to is FormatName.DEEPSPEC else Algorithm.EAGLE3
        export(str(self._dataset), self._out, ExportOptions(to, algorithm))


@contextmanager
def _clock() -> Iterator[Callable[[], Turn]]:
    """Time the block; call what is given after it."""
    wall, cpu = time.perf_counter(), time.process_time()
    ended: list[Turn] = []
    yield lambda: ended[0]
    ended.append(Turn(time.perf_counter() - wall, time.process_time() - cpu))


def _drop(file: Path) -> None:
    """Let the page cache forget a file; dirty pages would stay, so they are written first."""
    fd = os.open(file, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def _read_through(file: Path) -> None:
    buffer = bytearray(_COPY_BYTES)
    with file.open("rb", buffering=0) as opened:
        while opened.readinto(buffer):
            pass
