"""SpecForge 0.2, offline: `data/rows_<a>-<b>/data_<row>.ckpt`, one dict of tensors a row.

Un-shifted; layers are counted from the first layer's output, which is 0. `hidden_state` is the last layer
after the final norm: the trainer's head is the bare `lm_head`. DFlash, Domino and DSpark raise on a row
without two supervised tokens side by side, so those rows are left out.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from service.errors import OptionRefused
from service.export.format import Piece, one_file_each, shell_block
from service.export.options import Algorithm
from service.export.saving import save_torch, seal_json, seal_torch
from service.export.source import Source
from service.export.target import find_target
from service.export.vocabulary import token_counts, vocabulary_map
from service.reader import Row

DATA = "data"
VOCABULARY = "vocab_mapping.pt"
CONFIG = "train.json"
INDEX_HINT = (
    "The trainer finds the target's head through `*.index.json`. A target that is one file has none; put "
    "this beside its weights as `model.safetensors.index.json`:\n\n```json\n"
    '{"weight_map": {"lm_head.weight": "model.safetensors", '
    '"model.embed_tokens.weight": "model.safetensors"}}\n```\n'
)
EAGLE3_LAYERS = 3


@dataclass(frozen=True, slots=True)
class SpecForge:
    """The files that `specforge train` reads with `data.hidden_states_path`."""

    source: Source

    @property
    def trainer_layers(self) -> list[int]:
        """Counted from 0."""
        return self.source.zero_based

    def pieces(self) -> Iterator[Piece]:
        """Yield a file a row, in folders of 2000."""
        return one_file_each(DATA + "/{folder}/data_{number}.ckpt", self._numbers())

    def _numbers(self) -> Iterator[int]:
        """Yield the rows that the trainer takes."""
        every = self.source.options.algorithm is Algorithm.EAGLE3
        for number in range(len(self.source.rows)):
            if every or _has_pair(self.source.rows.row(number)):
                yield number

    def _counts(self) -> dict[int, int]:
        """Count the supervised tokens of those rows."""
        if self.source.options.algorithm is Algorithm.EAGLE3:
            return token_counts(self.source)
        return token_counts(self.source, (self.source.rows.row(number) for number in self._numbers()))

    def write(self, temporary: Path, rows: Iterable[Row]) -> None:
        """Write one row."""
        for row in rows:
            auxiliary_1TA = row.auxiliary(self.source.layers)[None]
            tensors = {"input_ids": row.input_ids, "loss_mask": row.loss_mask.long()}
            match self.source.options.algorithm:
                case Algorithm.EAGLE3:
                    tensors["hidden_state"] = row.last_normed()[None]
                    tensors["aux_hidden_state"] = auxiliary_1TA
                case Algorithm.DSPARK:
                    tensors["hidden_states"] = auxiliary_1TA
                    tensors["target_last_hidden_states"] = row.last_normed()[None]
                case _:
                    tensors["hidden_states"] = auxiliary_1TA
            save_torch(temporary, tensors)

    def finish(self, out: Path) -> None:
        """Write the run's configuration and the vocabulary map."""
        options = self.source.options
        model: dict[str, object] = {"target_model_path": options.target or self.source.identity.model}
        if options.algorithm is Algorithm.EAGLE3:
            model["aux_hidden_state_layer_ids"] = self.trainer_layers
        if options.draft_vocab is not None:
            target_size = find_target(self.source).vocab_size
            d2t_D, t2d_V = vocabulary_map(self._counts(), options.draft_vocab, target_size)
            seal_torch(out / VOCABULARY, {"d2t": d2t_D, "t2d": t2d_V})
            model["vocab_mapping_path"] = str(out.absolute() / VOCABULARY)
        config = {
            "model": model,
            "data": {
                "hidden_states_path": str(out.absolute() / DATA),
                "max_length": max(self.source.rows.num_tokens),
            },
            "training": {"strategy": str(options.algorithm)},
            "output_dir": str(out.absolute() / "output"),
        }
        seal_json(out / CONFIG, config)

    def notes(self, out: Path) -> str:
        """Return the command."""
        command = shell_block(("specforge", "train", "--config", f"{out.absolute() / CONFIG}"))
        return (
            f"# Train with SpecForge\n\n{command}"
            f"Auxiliary layers {self.trainer_layers}, counted from 0; vLLM's ids are "
            f"{self.source.vllm_layers}. The draft model's config must name the same. The last layer is "
            f"after the final norm.\n\n{INDEX_HINT}"
        )


def need_three(source: Source) -> None:
    """Raise OptionRefused (`layers`) unless three layers are written, none of them the embeddings."""
    if len(source.layers) != EAGLE3_LAYERS or 0 in source.layers:
        raise OptionRefused(
            f"{source.options.to} trains EAGLE-3 on three decoder layers, not on {source.vllm_layers}",
            field="layers",
            cure=f"name three of {list(source.rows.about.layer_ids)} in --layers",
        )


def _has_pair(row: Row) -> bool:
    return bool(torch.any((row.loss_mask[1:] & row.loss_mask[:-1]) == 1))


def make(source: Source) -> SpecForge:
    """Return the format. Raises OptionRefused (`layers`)."""
    if source.options.algorithm is Algorithm.EAGLE3:
        need_three(source)
    return SpecForge(source)
