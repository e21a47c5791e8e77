"""What NeMo Automodel's two caches share: shards of rows of one length, stacked, that are made in memory.

Legend: S tokens of every row.
"""

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

from service.export.format import Format, RowFile, shell_block
from service.export.saving import save_safetensors
from service.export.source import Source
from service.export.target import TargetFolder
from service.reader import Row

DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


@dataclass(frozen=True, slots=True)
class NemoCache(Format):
    """Rows lie in shards: `shard_size` rows in every one but the last, each cut or padded to S tokens."""

    RECIPE: ClassVar[str]
    """The trainer's module that reads the cache."""

    target: TargetFolder
    seq_length: int
    shard_size: int

    def row_files(self) -> Iterator[RowFile]:
        """Yield the shards."""
        for number, begin in enumerate(range(0, len(self.source.rows), self.shard_size)):
            numbers = range(begin, min(begin + self.shard_size, len(self.source.rows)))
            yield RowFile(f"shard-{number:06d}.safetensors", numbers)

    def write(self, temporary: Path, rows: Iterable[Row]) -> None:
        """Stack a shard's rows in memory and write them."""
        stacked: dict[str, list[torch.Tensor]] = {}
        for row in rows:
            for name, tensor in self.tensors(row).items():
                stacked.setdefault(name, []).append(fitted(tensor, self.seq_length))
        save_safetensors(temporary, {name: torch.stack(tensors) for name, tensors in stacked.items()})

    @abstractmethod
    def tensors(self, row: Row) -> dict[str, torch.Tensor]:
        """Return a row's tensors, [T, ...] each."""

    def facts(self) -> dict[str, object]:
        """Return what both manifests say of the rows."""
        return {
            "target_model": self.model,
            "seq_length": self.seq_length,
            "dtype": DTYPE_NAMES[self.source.rows.about.dtype],
            "num_samples": len(self.source.rows),
            "shard_size": self.shard_size,
        }

    def notes(self, out: Path) -> str:
        """Return the command, and how many rows are cut."""
        rows = self.source.rows
        cut = sum(num_tokens > self.seq_length for num_tokens in rows.num_tokens)
        command = shell_block(
            f"torchrun --nproc-per-node=8 -m nemo_automodel.recipes.llm.{self.RECIPE}",
            "--config YOUR_CONFIG.yaml",
            (f"--recipe_args.cached_target_path={out.absolute()}",),
            f"--recipe_args.seq_length={self.seq_length}",
        )
        return (
            f"# Train with NeMo Automodel\n\n{command}{self.layers_note()} Rows are {self.seq_length} tokens "
            f"long; {cut} of {len(rows)} are cut to that. {self.last_note()}\n"
        )

    @abstractmethod
    def last_note(self) -> str:
        """Return what else to know before training."""


def sequence_length(source: Source) -> int:
    """Return S: the length in the options, or the longest row's."""
    return source.options.max_tokens or max(source.rows.num_tokens)


def rows_a_shard(source: Source, row_width: int, shard_bytes: int) -> int:
    """Return how many rows of S tokens fit `shard_bytes`, one at least; a token has `row_width` floats."""
    row_bytes = sequence_length(source) * row_width * source.rows.about.dtype.itemsize
    return max(1, shard_bytes // row_bytes)


def fitted(tensor: torch.Tensor, length: int) -> torch.Tensor:
    """Return a tensor [T, ...] cut, or padded with zeros, to [length, ...]."""
    out = tensor.new_zeros((length, *tensor.shape[1:]))
    out[: len(tensor)] = tensor[:length]
    return out
