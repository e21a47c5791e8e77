"""EAGLE-1 and EAGLE-2 `ge_data`: `data/data_<row>.ckpt`, one dict per row.

Un-shifted; the trainer shifts ids and target itself. `hidden_state` is the last layer after the final norm in
float16, whose range is smaller than bfloat16's: a state that does not fit is refused, never made infinite.
"""

from typing import Any

import torch

from service.errors import OptionRefused
from service.export.format import TorchFileEachRow, refuse_draft_vocab, refuse_pre_norm
from service.export.source import Source
from service.reader import Row


class Eagle(TorchFileEachRow):
    """The files that `eagle.train.main --tmpdir` reads; it opens every file below that folder.

    So there is none beside the rows.
    """

    DATA = "data"
    PATH = DATA + "/data_{number}.ckpt"

    def content(self, row: Row) -> dict[str, Any]:
        """Return a row's tensors. Raises OptionRefused (`to`) if a state exceeds float16's range."""
        return {
            "input_ids": row.input_ids,
            "hidden_state": halved(row.last_normed(), row.sample_id),
            "loss_mask": row.loss_mask.long(),
        }


def halved(states_TH: torch.Tensor, sample_id: str) -> torch.Tensor:
    """Return float16 states. Raises OptionRefused (`to`), naming the sample, if one does not fit."""
    half_TH = states_TH.half()
    if not torch.isfinite(half_TH).all():
        raise OptionRefused(
            f"sample {sample_id} holds a state of {states_TH.abs().max().item():g}, "
            f"beyond float16's {torch.finfo(torch.float16).max:g}",
            field="to",
            cure="export to a format that keeps the dataset's dtype, such as specforge",
        )
    return half_TH


def make(source: Source) -> Eagle:
    """Return the format. Raises OptionRefused (`algorithm`, `draft_vocab`)."""
    refuse_draft_vocab(source, "EAGLE-1 and EAGLE-2 draft")
    cure = "train EAGLE-3, or another trainer on the rows of service.reader.Mtp(1, normed=False)"
    refuse_pre_norm(source, "EAGLE-1 and EAGLE-2 drafters", cure)
    return Eagle(source)
