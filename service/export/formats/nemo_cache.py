"""What NeMo Automodel's two caches share: shards of rows of one length, stacked, that are made in memory.

Legend: S tokens of every row.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from service.export.format import Piece, shell_block
from service.export.saving import save_safetensors
from service.export.source import Source

DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Cache:
    """How the rows of `source` lie in shards: `shard_size` rows in every one but the last, S tokens each."""

    source: Source
    seq_length: int
    shard_size: int

    def pieces(self) -> Iterator[Piece]:
        """Yield the shards."""
        for number, begin in enumerate(range(0, len(self.source.rows), self.shard_size)):
            numbers = range(begin, min(begin + self.shard_size, len(self.source.rows)))
            yield Piece(f"shard-{number:06d}.safetensors", numbers)

    def facts(self) -> dict[str, object]:
        """Return what both manifests say of the rows."""
        about = self.source.rows.about
        return {
            "target_model": self.source.options.target or self.source.identity.model,
            "seq_length": self.seq_length,
            "dtype": DTYPE_NAMES[about.dtype],
            "num_samples": len(self.source.rows),
            "shard_size": self.shard_size,
        }

    def notes(self, recipe: str, out: Path, more: str) -> str:
        """Return the command of `recipe`, how many rows are cut, and `more` to know."""
        rows = self.source.rows
        cut = sum(num_tokens > self.seq_length for num_tokens in rows.num_tokens)
        command = shell_block(
            f"torchrun --nproc-per-node=8 -m nemo_automodel.recipes.llm.{recipe}",
            "--config YOUR_CONFIG.yaml",
            (f"--recipe_args.cached_target_path={out.absolute()}",),
            f"--recipe_args.seq_length={self.seq_length}",
        )
        return (
            f"# Train with NeMo Automodel\n\n{command}"
            f"Auxiliary layers {self.source.zero_based}, counted from 0; vLLM's ids are "
            f"{self.source.vllm_layers}. Rows are {self.seq_length} tokens long; {cut} of {len(rows)} are "
            f"cut to that. {more}\n"
        )


def cache_of(source: Source, row_width: int, shard_bytes: int) -> Cache:
    """Return the cache whose shards hold at most `shard_bytes` of floats, or one row.

    A row holds `row_width` floats a token, in the dataset's dtype.
    """
    seq_length = source.options.max_tokens or max(source.rows.num_tokens)
    row_bytes = seq_length * row_width * source.rows.about.dtype.itemsize
    return Cache(source, seq_length, max(1, shard_bytes // row_bytes))


def save_stacked(path: Path, rows: Iterable[Tensors], length: int) -> None:
    """Stack tensors [T, ...] of every row, each cut or padded to `length`, and write them."""
    stacked: dict[str, list[torch.Tensor]] = {}
    for row in rows:
        for name, tensor in row.items():
            stacked.setdefault(name, []).append(fitted(tensor, length))
    save_safetensors(path, {name: torch.stack(tensors) for name, tensors in stacked.items()})


def fitted(tensor: torch.Tensor, length: int) -> torch.Tensor:
    """Return a tensor [T, ...] cut, or padded with zeros, to [length, ...]."""
    out = tensor.new_zeros((length, *tensor.shape[1:]))
    out[: len(tensor)] = tensor[:length]
    return out
