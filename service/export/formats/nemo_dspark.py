"""NeMo Automodel's DSpark cache: un-shifted rows, and the target's embedding and head beside them.

Layers are counted from 0, the embeddings are -1. Every row is padded with zeros, or cut, to S tokens, which
`attention_mask` tells. The last layer is after the final norm.

Legend: V target's vocabulary, H hidden size.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from schemas.dataset.seal import sealing
from service.errors import OptionRefused
from service.export.format import Piece
from service.export.formats.nemo_cache import Cache, Tensors, cache_of, save_stacked
from service.export.saving import seal_json
from service.export.source import Source
from service.export.target import TargetFolder
from service.reader import Row

VERSION = 1


@dataclass(frozen=True, slots=True)
class DSparkCache:
    """The files that `recipe_args.cached_target_path` of `train_dspark` names."""

    source: Source
    target: TargetFolder
    cache: Cache

    @property
    def trainer_layers(self) -> list[int]:
        """Counted from 0."""
        return self.source.zero_based

    def pieces(self) -> Iterator[Piece]:
        """Yield shards."""
        return self.cache.pieces()

    def write(self, temporary: Path, rows: Iterable[Row]) -> None:
        """Stack a shard's rows in memory and write them."""
        save_stacked(temporary, map(self._tensors, rows), self.cache.seq_length)

    def _tensors(self, row: Row) -> Tensors:
        return {
            "input_ids": row.input_ids,
            "attention_mask": torch.ones(row.num_tokens, dtype=torch.int64),
            "loss_mask": row.loss_mask.long(),
            "target_hidden_states": row.auxiliary(self.source.layers),
            "target_last_hidden_states": row.last_normed(),
        }

    def finish(self, out: Path) -> None:
        """Write the target's weights, then the manifest, without which the cache is not read."""
        embedding_VH, head_VH = self.target.embedding_and_head()
        with sealing(out / "target_weights.safetensors") as temporary:
            save_file({"embed_tokens.weight": embedding_VH, "lm_head.weight": head_VH.clone()}, temporary)
        about = self.source.rows.about
        rest = {
            "format_version": VERSION,
            "target_model_type": self.target.model_type,
            "target_vocab_size": self.target.vocab_size,
            "hidden_size": about.hidden_size,
            "num_hidden_layers": about.num_layers,
            "target_hidden_dim": about.hidden_size * len(self.source.layers),
            "target_last_hidden_dim": about.hidden_size,
            "target_layer_ids": self.trainer_layers,
            "train_data_path": f"quarry:{','.join(self.source.manifests)}",
            "train_split": None,
            "shuffle_seed": 0,
            "mask_reasoning_content": False,
            "chat_template_sha256": self.source.identity.template_sha256,
            "complete": True,
        }
        seal_json(out / "manifest.json", self.cache.facts() | rest)

    def notes(self, out: Path) -> str:
        """Return the command, and how many rows are cut."""
        return self.cache.notes("train_dspark", out, "The last layer is after the final norm.")


def make(source: Source, target: TargetFolder, shard_bytes: int) -> DSparkCache:
    """Return the format. Raises OptionRefused (`draft_vocab`)."""
    if source.options.draft_vocab is not None:
        raise OptionRefused(
            "DSpark drafts from the target's whole vocabulary",
            field="draft_vocab",
            cure="leave --draft-vocab out",
        )
    width = source.rows.about.hidden_size * (len(source.layers) + 1)
    return DSparkCache(source, target, cache_of(source, width, shard_bytes))
