"""SpecForge 0.2, offline: `data/rows_<a>-<b>/data_<row>.ckpt`, one dict of tensors per row.

Un-shifted; layers are numbered from the first layer's output, which is 0. `hidden_state` is the last layer
after the final norm: the trainer's head is only the `lm_head`. DFlash, Domino and DSpark fail on a row
without two adjacent supervised tokens, so such rows are left out.
"""

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from service.errors import OptionRefused
from service.export.format import TorchFileEachRow, refuse_draft_vocab
from service.export.options import Algorithm
from service.export.saving import Writers, save_json
from service.export.source import Source
from service.export.vocabulary import vocabulary_file
from service.reader import Row

VOCABULARY = "vocab_mapping.pt"
EAGLE3_LAYERS = 3


class SpecForge(TorchFileEachRow):
    """The files that `specforge train` reads with `data.hidden_states_path`."""

    DATA, CONFIG = "data", "train.json"
    PATH = DATA + "/{folder}/data_{number}.ckpt"

    def numbers(self) -> Iterable[int]:
        """Return the numbers of the rows that the trainer can use."""
        every = range(len(self.source.rows))
        if self.source.options.algorithm is Algorithm.EAGLE3:
            return every
        return (number for number in every if _has_pair(self.source.rows.row(number)))

    def content(self, row: Row) -> dict[str, Any]:
        """Return a row's tensors, with the algorithm's names."""
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
        return tensors

    def beside(self, out: Path) -> Writers:
        """Return the vocabulary map and the run's configuration."""
        vocabulary = vocabulary_file(VOCABULARY, self.source)
        return {**vocabulary, self.CONFIG: partial(save_json, content=self._config(out))}

    def _config(self, out: Path) -> dict[str, object]:
        options = self.source.options
        model: dict[str, object] = {"target_model_path": self.model}
        if options.algorithm is Algorithm.EAGLE3:
            model["aux_hidden_state_layer_ids"] = self.trainer_layers
        if options.draft_vocab is not None:
            model["vocab_mapping_path"] = str(out.absolute() / VOCABULARY)
        return {
            "model": model,
            "data": {
                "hidden_states_path": str(out.absolute() / self.DATA),
                "max_length": max(self.source.rows.num_tokens),
            },
            "training": {"strategy": str(options.algorithm)},
            "output_dir": str(out.absolute() / "output"),
        }


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
    """Return the format. Raises OptionRefused (`draft_vocab`, `layers`)."""
    if source.options.algorithm is Algorithm.EAGLE3:
        need_three(source)
    else:  # the trainer would be told of a map, and ignore it
        refuse_draft_vocab(source, "SpecForge's DFlash, Domino and DSpark draft")
    return SpecForge(source)
