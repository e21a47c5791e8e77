"""AngelSlim, offline EAGLE-3: `rank_0/rows_<a>-<b>/data_<row>.ckpt`, one dict a row, with a batch of one.

Un-shifted. `hidden_states` are three auxiliary layers, `target_hiddens` the last one after the final norm:
the trainer's head is the bare `lm_head`.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from service.export.format import TorchFileEachRow, shell_block
from service.export.formats.specforge import INDEX_HINT, VOCABULARY, need_three
from service.export.source import Source
from service.export.vocabulary import seal_vocabulary
from service.reader import Row

DATA = "rank_0"


@dataclass(frozen=True, slots=True)
class AngelSlim(TorchFileEachRow):
    """The files that `tools/train_eagle3_offline.py --train_hidden_path` reads."""

    PATH = DATA + "/{folder}/data_{number}.ckpt"

    def content(self, row: Row) -> dict[str, Any]:
        """Return a row's tensors."""
        return {
            "input_ids": row.input_ids[None],
            "loss_mask": row.loss_mask.long()[None],
            "hidden_states": row.auxiliary(self.source.layers)[None],
            "target_hiddens": row.last_normed()[None],
        }

    def finish(self, out: Path) -> None:
        """Write the vocabulary map."""
        seal_vocabulary(out / VOCABULARY, self.source)

    def notes(self, out: Path) -> str:
        """Return the command."""
        command = shell_block(
            "torchrun --nproc_per_node=8 tools/train_eagle3_offline.py",
            ("--target_model_name_or_path", self.model),
            "--draft_model_config_path YOUR_DRAFT_CONFIG.json",
            "--train_data_path YOUR_CONVERSATIONS.jsonl",
            ("--train_hidden_path", f"{out.absolute() / DATA}"),
            f"--model_max_length {max(self.source.rows.num_tokens)}",
            "--lm_head_key lm_head.weight --bf16",
            ("--output_dir", f"{out.absolute() / 'output'}"),
        )
        return (
            f"# Train with AngelSlim\n\n{command}{self.layers_note()} "
            f"The last layer is after the final norm.\n\n{INDEX_HINT}"
        )


def make(source: Source) -> AngelSlim:
    """Return the format. Raises OptionRefused (`layers`)."""
    need_three(source)
    return AngelSlim(source)
