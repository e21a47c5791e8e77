"""What one turn of the reader bench does: read every row once, or write every row once.

A row that is read ends as two tensors of its own: the auxiliary layers side by side [T, A * H], and the last
one [T, H]. Legend: T tokens, A auxiliary layers, H hidden size.
"""

import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from connector.seal import sealing
from service.export.options import Algorithm, ExportOptions, FormatName
from service.export.run import export
from service.reader import QuarryDataset

_COPY_BYTES = 2**24


@dataclass(frozen=True, slots=True)
class Turn:
    """Wall and CPU seconds of one turn."""

    seconds: float
    cpu_s: float


class ReadBench:
    """Reads the rows of a dataset and of its export to speculators, one reader at a time, in any order."""

    def __init__(self, dataset: Path, exported: Path) -> None:
        """Open both; the trainer's package must be importable."""
        from speculators.train.data import ArrowDataset

        self._shards = sorted(dataset.glob("data/*/*.parquet"))
        self._files = {
            "read()": self._shards,
            "quarry": self._shards,
            "speculators": sorted(exported.glob("hidden_states/*")),
        }
        self._quarry = QuarryDataset(dataset)
        self._theirs: Any = ArrowDataset(max_len=2**30, datapath=exported, on_missing="raise")
        self.kinds: dict[str, Callable[[Sequence[int]], None]] = {
            "read()": self._plain,
            "quarry": self._ours,
            "speculators": self._speculators,
        }

    def __len__(self) -> int:
        return len(self._quarry)

    def run(self, kind: str, order: Sequence[int], *, cold: bool) -> Turn:
        """Read every row once in `order`, from a page cache that holds none of it or all of it."""
        for file in self._files[kind]:
            (_drop if cold else _warm)(file)
        with _clock() as turn:
            self.kinds[kind](order)
        return turn()

    def _plain(self, order: Sequence[int]) -> None:
        buffer = bytearray(_COPY_BYTES)
        for shard in self._shards:
            with shard.open("rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass

    def _ours(self, order: Sequence[int]) -> None:
        for number in order:
            row = self._quarry[number]
            _ = row.input_ids, row.loss_mask, row.auxiliary(), row.last()

    def _speculators(self, order: Sequence[int]) -> None:
        for number in order:
            row = self._theirs[number]
            # Their tensors are views of a mapped file: nothing was read until it is asked for in one piece.
            _ = row["hidden_states"].contiguous(), row["verifier_last_hidden_states"].contiguous()


def one_layer_share(dataset: Path) -> float:
    """Return how much of a dataset's shard bytes opening it and reading the last layer of all rows reads."""
    before = _bytes_read()
    rows = QuarryDataset(dataset)
    for number in range(len(rows)):
        rows[number].last()
    read = _bytes_read() - before
    return read / sum(shard.stat().st_size for shard in dataset.glob("data/*/*.parquet"))


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
            _warm(shard)
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


def _warm(file: Path) -> None:
    buffer = bytearray(_COPY_BYTES)
    with file.open("rb", buffering=0) as opened:
        while opened.readinto(buffer):
            pass


def _bytes_read() -> int:
    """Return the bytes that this process has asked read() and its kin for."""
    for line in Path("/proc/self/io").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "rchar":
            return int(value)
    raise OSError("/proc/self/io counts nothing here")
