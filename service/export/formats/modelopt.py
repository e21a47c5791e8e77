"""ModelOpt, offline: `data/<row>.pt`, one dict per row.

Un-shifted; layers are numbered from 0. `hidden_states` is the last layer after the final norm, which
`hidden_states_prenorm` states; it is also the reader's default.
"""

from pathlib import Path
from typing import Any

from service.export.format import TorchFileEachRow, refuse_draft_vocab, refuse_last_layer
from service.export.options import Algorithm
from service.export.saving import Writers, save_torch
from service.export.source import Source
from service.export.vocabulary import draft_vocabulary
from service.reader import Row


class ModelOpt(TorchFileEachRow):
    """The files that ModelOpt reads with `data.offline_data_path`, which takes every `.pt` in the folder."""

    DATA, VOCABULARY = "data", "d2t.pt"
    PATH = DATA + "/{number:08d}.pt"

    def content(self, row: Row) -> dict[str, Any]:
        """Return a row's tensors."""
        return {
            "input_ids": row.input_ids,
            "loss_mask": row.loss_mask.long(),
            "hidden_states": row.last_normed(),
            "hidden_states_prenorm": False,
            "aux_hidden_states": row.auxiliary(self.source.layers),
            "conversation_id": row.sample_id,
        }

    def beside(self, out: Path) -> Writers:
        """Return the vocabulary map, of which this trainer reads one half."""
        if (size := self.source.options.draft_vocab) is None:
            return {}
        return {self.VOCABULARY: lambda path: save_torch(path, draft_vocabulary(self.source, size)["d2t"])}


def make(source: Source) -> ModelOpt:
    """Return the format. Raises OptionRefused (`draft_vocab`, `layers`)."""
    refuse_last_layer(source)
    if source.options.algorithm is Algorithm.DFLASH:
        refuse_draft_vocab(source, "ModelOpt's DFlash drafts")
    return ModelOpt(source)
