"""AngelSlim, offline EAGLE-3: `rank_0/rows_<a>-<b>/data_<row>.ckpt`, one dict per row, as a batch of one.

Un-shifted. `hidden_states` are three auxiliary layers, `target_hiddens` the last layer after the final norm:
the trainer's head is only the `lm_head`. It does not start without a vocabulary map beside `rank_0`.
"""

from pathlib import Path
from typing import Any

from service.errors import OptionRefused
from service.export.format import TorchFileEachRow, refuse_last_layer
from service.export.formats.specforge import VOCABULARY, need_three
from service.export.saving import Writers
from service.export.source import Source
from service.export.vocabulary import vocabulary_file
from service.reader import Row


class AngelSlim(TorchFileEachRow):
    """The files that `tools/train_eagle3_offline.py --train_hidden_path` reads."""

    PATH = "rank_0/{folder}/data_{number}.ckpt"

    def content(self, row: Row) -> dict[str, Any]:
        """Return a row's tensors."""
        return {
            "input_ids": row.input_ids[None],
            "loss_mask": row.loss_mask.long()[None],
            "hidden_states": row.auxiliary(self.source.layers)[None],
            "target_hiddens": row.last_normed()[None],
        }

    def beside(self, out: Path) -> Writers:
        """Return the vocabulary map."""
        return vocabulary_file(VOCABULARY, self.source)


def make(source: Source) -> AngelSlim:
    """Return the format. Raises OptionRefused (`draft_vocab`, `layers`)."""
    need_three(source)
    refuse_last_layer(source)
    if source.options.draft_vocab is None:
        raise OptionRefused(
            "this trainer does not start without the vocabulary map that a draft vocabulary makes",
            field="draft_vocab",
            cure="name the draft config's draft_vocab_size in --draft-vocab, such as 32000",
        )
    return AngelSlim(source)
