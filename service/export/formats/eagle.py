"""EAGLE-1 and EAGLE-2 `ge_data`: `data/data_<row>.ckpt`, one dict a row.

Un-shifted; the trainer shifts ids and target itself. `hidden_state` is the last layer after the final norm in
float16, whose range is smaller than bfloat16's: a state that does not fit is refused, never made infinite.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from service.errors import OptionRefused
from service.export.format import Piece, one_file_each, shell_block
from service.export.formats.specforge import INDEX_HINT
from service.export.saving import save_torch
from service.export.source import Source
from service.reader import Row

DATA = "data"


@dataclass(frozen=True, slots=True)
class Eagle:
    """The files that `eagle.train.main --tmpdir` reads; it opens every file below that folder."""

    source: Source

    @property
    def trainer_layers(self) -> list[int]:
        """None."""
        return []

    def pieces(self) -> Iterator[Piece]:
        """Yield a file a row."""
        return one_file_each(DATA + "/data_{number}.ckpt", range(len(self.source.rows)))

    def write(self, temporary: Path, rows: Iterable[Row]) -> None:
        """Write one row. Raises OptionRefused (`to`) if a state is beyond float16."""
        for row in rows:
            tensors = {
                "input_ids": row.input_ids,
                "hidden_state": halved(row.last_normed(), row.sample_id),
                "loss_mask": row.loss_mask.long(),
            }
            save_torch(temporary, tensors)

    def finish(self, out: Path) -> None:
        """Nothing stands beside the rows: this trainer reads any file."""

    def notes(self, out: Path) -> str:
        """Return the command."""
        model = self.source.options.target or self.source.identity.model
        command = shell_block(
            "accelerate launch -m --mixed_precision=bf16 eagle.train.main",
            ("--basepath", model),
            "--configpath YOUR_DRAFT_CONFIG.json",
            ("--tmpdir", f"{out.absolute() / DATA}"),
            ("--cpdir", f"{out.absolute() / 'checkpoints'}"),
        )
        return (
            f"# Train with EAGLE\n\n{command}"
            f"The last layer is after the final norm, in float16.\n\n{INDEX_HINT}"
        )


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
    """Return the format. Raises OptionRefused (`draft_vocab`)."""
    if source.options.draft_vocab is not None:
        raise OptionRefused(
            "EAGLE-1 and EAGLE-2 draft from the target's whole vocabulary",
            field="draft_vocab",
            cure="leave --draft-vocab out",
        )
    return Eagle(source)
