"""NeMo Automodel reads two caches, one a recipe: EAGLE-3's, and DSpark's, which is here.

DSpark's rows are un-shifted, with the target's embedding and head beside them. Layers are counted from 0, the
embeddings are -1. Every row is padded with zeros, or cut, to S tokens; `attention_mask` shows which. The last
layer is after the final norm.

Legend: V target's vocabulary, H hidden size.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from schemas.dataset.seal import sealing
from service.errors import OptionRefused
from service.export.format import Format, refuse_draft_vocab
from service.export.formats import nemo_eagle3
from service.export.formats.nemo_cache import NemoCache, rows_a_shard, sequence_length
from service.export.options import Algorithm
from service.export.saving import save_safetensors, seal_json
from service.export.source import Source
from service.export.target import find_target
from service.reader import Row

SHARD_BYTES = 2**28
"""A shard is made in memory."""
VERSION = 1


@dataclass(frozen=True, slots=True)
class DSparkCache(NemoCache):
    """The files that `recipe_args.cached_target_path` of `train_dspark` names."""

    RECIPE = "train_dspark"

    def tensors(self, row: Row) -> dict[str, torch.Tensor]:
        """Return a row's tensors."""
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
            save_safetensors(temporary, {"embed_tokens.weight": embedding_VH, "lm_head.weight": head_VH})
        dataset = self.source.rows.about
        manifest = self.facts() | {
            "format_version": VERSION,
            "target_model_type": self.target.model_type,
            "target_vocab_size": self.target.vocab_size,
            "hidden_size": dataset.hidden_size,
            "num_hidden_layers": dataset.num_layers,
            "target_hidden_dim": dataset.hidden_size * len(self.source.layers),
            "target_last_hidden_dim": dataset.hidden_size,
            "target_layer_ids": self.trainer_layers,
            "train_data_path": f"quarry:{','.join(self.source.manifests)}",
            "train_split": None,
            "shuffle_seed": 0,
            "mask_reasoning_content": False,
            "chat_template_sha256": self.source.identity.template_sha256,
            "complete": True,
        }
        seal_json(out / "manifest.json", manifest)

    def last_note(self) -> str:
        """Return where the last layer was taken."""
        return "The last layer is after the final norm."


def make(source: Source) -> Format:
    """Return the format. Raises OptionRefused (`draft_vocab`, `layers`, `target`), EngineRefused."""
    target = find_target(source)
    if not any(target.folder.glob("*.safetensors")):
        raise OptionRefused(
            f"{target.folder} holds no weights, and this trainer reads the target's embedding and head",
            field="target",
            cure="download the target and name its folder in --target",
        )
    if source.options.algorithm is Algorithm.EAGLE3:
        return nemo_eagle3.make(source, target, SHARD_BYTES)
    refuse_draft_vocab(source, "DSpark drafts")
    width = source.rows.about.hidden_size * (len(source.layers) + 1)
    return DSparkCache(source, target, sequence_length(source), rows_a_shard(source, width, SHARD_BYTES))
