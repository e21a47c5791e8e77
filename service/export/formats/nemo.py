"""NeMo Automodel's DSpark cache: `shard-<n>.safetensors` of rows of one length, stacked, and a manifest.

Un-shifted; layers are counted from 0, the embeddings are -1. Every row is padded with zeros, or cut, to S
tokens, which `attention_mask` tells. The last layer is after the final norm. The target's embedding and head
stand beside the rows, so that training needs no target.

Legend: N rows of a shard, S tokens of every row.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from connector.seal import sealing
from service.errors import OptionRefused
from service.export.format import Piece
from service.export.saving import seal_json
from service.export.source import Source
from service.export.target import TargetFolder, find_target
from service.reader import Row

VERSION = 1
SHARD_BYTES = 2**28
"""A shard is made in memory."""
_DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


@dataclass(frozen=True, slots=True)
class Nemo:
    """The files that `recipe_args.cached_target_path` names. `seq_length` is S."""

    source: Source
    target: TargetFolder
    seq_length: int
    shard_bytes: int

    @property
    def trainer_layers(self) -> list[int]:
        """Counted from 0."""
        return self.source.zero_based

    @property
    def shard_size(self) -> int:
        """Rows of every shard but the last."""
        about = self.source.rows.about
        row_bytes = self.seq_length * about.hidden_size * about.dtype.itemsize * (len(self.source.layers) + 1)
        return max(1, self.shard_bytes // row_bytes)

    def pieces(self) -> Iterator[Piece]:
        """Yield shards of `shard_size` rows."""
        for number, begin in enumerate(range(0, len(self.source.rows), self.shard_size)):
            numbers = range(begin, min(begin + self.shard_size, len(self.source.rows)))
            yield Piece(f"shard-{number:06d}.safetensors", numbers)

    def write(self, temporary: Path, rows: Iterable[Row]) -> None:
        """Stack a shard's rows in memory, at most `shard_bytes` of states or one row, and write them."""
        stacked: dict[str, list[torch.Tensor]] = {}
        for row in rows:
            tensors = {
                "input_ids": row.input_ids,
                "attention_mask": torch.ones(row.num_tokens, dtype=torch.int64),
                "loss_mask": row.loss_mask.long(),
                "target_hidden_states": row.auxiliary(self.source.layers),
                "target_last_hidden_states": row.last_normed(),
            }
            for name, tensor in tensors.items():
                stacked.setdefault(name, []).append(fitted(tensor, self.seq_length))
        save_file({name: torch.stack(tensors) for name, tensors in stacked.items()}, temporary)

    def finish(self, out: Path) -> None:
        """Write the target's weights, then the manifest, without which the cache is not read."""
        embedding_VH, head_VH = self.target.embedding_and_head()
        with sealing(out / "target_weights.safetensors") as temporary:
            save_file({"embed_tokens.weight": embedding_VH, "lm_head.weight": head_VH.clone()}, temporary)
        seal_json(out / "manifest.json", self._manifest())

    def _manifest(self) -> dict[str, Any]:
        about, identity = self.source.rows.about, self.source.identity
        return {
            "format_version": VERSION,
            "target_model": self.source.options.target or identity.model,
            "target_model_type": self.target.model_type,
            "target_vocab_size": self.target.vocab_size,
            "hidden_size": about.hidden_size,
            "num_hidden_layers": about.num_layers,
            "seq_length": self.seq_length,
            "dtype": _DTYPE_NAMES[about.dtype],
            "num_samples": len(self.source.rows),
            "shard_size": self.shard_size,
            "target_hidden_dim": about.hidden_size * len(self.source.layers),
            "target_last_hidden_dim": about.hidden_size,
            "target_layer_ids": self.trainer_layers,
            "train_data_path": f"quarry:{','.join(self.source.manifests)}",
            "train_split": None,
            "shuffle_seed": 0,
            "mask_reasoning_content": False,
            "chat_template_sha256": identity.template_sha256,
            "complete": True,
        }

    def notes(self, out: Path) -> str:
        """Return the command, and how many rows are cut."""
        cut = sum(num_tokens > self.seq_length for num_tokens in self.source.rows.num_tokens)
        command = " \\\n    ".join(
            [
                "torchrun --nproc-per-node=8 -m nemo_automodel.recipes.llm.train_dspark",
                "--config YOUR_CONFIG.yaml",
                f"--recipe_args.cached_target_path={out.absolute()}",
                f"--recipe_args.seq_length={self.seq_length}",
            ]
        )
        return (
            f"# Train with NeMo Automodel\n\n```sh\n{command}\n```\n\n"
            f"`target_layer_ids` {self.trainer_layers}, counted from 0; vLLM's ids are "
            f"{self.source.vllm_layers}. The last layer is after the final norm. Rows are {self.seq_length} "
            f"tokens long; {cut} of {len(self.source.rows)} are cut to that.\n"
        )


def fitted(tensor: torch.Tensor, length: int) -> torch.Tensor:
    """Return a tensor [T, ...] cut, or padded with zeros, to [length, ...]."""
    out = tensor.new_zeros((length, *tensor.shape[1:]))
    out[: len(tensor)] = tensor[:length]
    return out


def make(source: Source) -> Nemo:
    """Return the format. Raises OptionRefused (`draft_vocab`, `target`)."""
    if source.options.draft_vocab is not None:
        raise OptionRefused(
            "DSpark drafts from the target's whole vocabulary",
            field="draft_vocab",
            cure="leave --draft-vocab out",
        )
    target = find_target(source)
    if not any(target.folder.glob("*.safetensors")):
        raise OptionRefused(
            f"{target.folder} holds no weights, and this trainer reads the target's embedding and head",
            field="target",
            cure="download the target and name its folder in --target",
        )
    return Nemo(source, target, source.options.max_tokens or max(source.rows.num_tokens), SHARD_BYTES)
