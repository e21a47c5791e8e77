"""AngelSlim, offline EAGLE-3: `rank_0/rows_<a>-<b>/data_<row>.ckpt`, one dict a row, with a batch of one.

Un-shifted. `hidden_states` are three auxiliary layers, `target_hiddens` the last one after the final norm:
the trainer's head is the bare `lm_head`.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from service.export.format import Piece, one_file_each, shell_block
from service.export.formats.specforge import INDEX_HINT, VOCABULARY, need_three
from service.export.saving import save_torch, seal_torch
from service.export.source import Source
from service.export.target import find_target
from service.export.vocabulary import token_counts, vocabulary_map
from service.reader import Row

DATA = "rank_0"


@dataclass(frozen=True, slots=True)
class AngelSlim:
    """The files that `tools/train_eagle3_offline.py --train_hidden_path` reads."""

    source: Source

    @property
    def trainer_layers(self) -> list[int]:
        """Counted from 0."""
        return self.source.zero_based

    def pieces(self) -> Iterator[Piece]:
        """Yield a file a row, in folders of 2000."""
        return one_file_each(DATA + "/{folder}/data_{number}.ckpt", range(len(self.source.rows)))

    def write(self, temporary: Path, rows: Iterable[Row]) -> None:
        """Write one row."""
        for row in rows:
            tensors = {
                "input_ids": row.input_ids[None],
                "loss_mask": row.loss_mask.long()[None],
                "hidden_states": row.auxiliary(self.source.layers)[None],
                "target_hiddens": row.last_normed()[None],
            }
            save_torch(temporary, tensors)

    def finish(self, out: Path) -> None:
        """Write the vocabulary map."""
        if self.source.options.draft_vocab is not None:
            sizes = self.source.options.draft_vocab, find_target(self.source).vocab_size
            d2t_D, t2d_V = vocabulary_map(token_counts(self.source), *sizes)
            seal_torch(out / VOCABULARY, {"d2t": d2t_D, "t2d": t2d_V})

    def notes(self, out: Path) -> str:
        """Return the command."""
        model = self.source.options.target or self.source.identity.model
        command = shell_block(
            "torchrun --nproc_per_node=8 tools/train_eagle3_offline.py",
            ("--target_model_name_or_path", model),
            "--draft_model_config_path YOUR_DRAFT_CONFIG.json",
            "--train_data_path YOUR_CONVERSATIONS.jsonl",
            ("--train_hidden_path", f"{out.absolute() / DATA}"),
            f"--model_max_length {max(self.source.rows.num_tokens)}",
            "--lm_head_key lm_head.weight --bf16",
            ("--output_dir", f"{out.absolute() / 'output'}"),
        )
        return (
            f"# Train with AngelSlim\n\n{command}"
            f"Auxiliary layers {self.trainer_layers}, counted from 0; vLLM's ids are "
            f"{self.source.vllm_layers}. The last layer is after the final norm.\n\n{INDEX_HINT}"
        )


def make(source: Source) -> AngelSlim:
    """Return the format. Raises OptionRefused (`layers`)."""
    need_three(source)
    return AngelSlim(source)
