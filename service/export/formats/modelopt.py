"""ModelOpt, offline: `data/<row>.pt`, one dict a row.

Un-shifted; layers are counted from 0. `hidden_states` is the last layer after the final norm, and
`hidden_states_prenorm` says so: the reader takes that for granted where it is missing.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from service.export.format import Piece, one_file_each, shell_block
from service.export.saving import save_torch, seal_torch
from service.export.source import Source
from service.export.target import find_target
from service.export.vocabulary import token_counts, vocabulary_map
from service.reader import Row

DATA = "data"
VOCABULARY = "d2t.pt"


@dataclass(frozen=True, slots=True)
class ModelOpt:
    """The files that ModelOpt reads with `data.offline_data_path`, which takes every `.pt` in the folder."""

    source: Source

    @property
    def trainer_layers(self) -> list[int]:
        """Counted from 0."""
        return self.source.zero_based

    def pieces(self) -> Iterator[Piece]:
        """Yield a file a row."""
        return one_file_each(DATA + "/{number:08d}.pt", range(len(self.source.rows)))

    def write(self, temporary: Path, rows: Iterable[Row]) -> None:
        """Write one row."""
        for row in rows:
            content = {
                "input_ids": row.input_ids,
                "loss_mask": row.loss_mask.long(),
                "hidden_states": row.last_normed(),
                "hidden_states_prenorm": False,
                "aux_hidden_states": row.auxiliary(self.source.layers),
                "conversation_id": row.sample_id,
            }
            save_torch(temporary, content)

    def finish(self, out: Path) -> None:
        """Write the vocabulary map, of which this trainer reads one half."""
        if self.source.options.draft_vocab is not None:
            sizes = self.source.options.draft_vocab, find_target(self.source).vocab_size
            d2t_D, _ = vocabulary_map(token_counts(self.source), *sizes)
            seal_torch(out / VOCABULARY, d2t_D)

    def notes(self, out: Path) -> str:
        """Return the command."""
        options = self.source.options
        lines: list[str | tuple[str, ...]] = [
            "./launch_train.sh --config ../../modelopt_recipes/general/speculative_decoding/"
            f"{options.algorithm}.yaml",
            (f"model.model_name_or_path={options.target or self.source.identity.model}",),
            "model.use_fake_base_for_offline=true",
            (f"data.offline_data_path={out.absolute() / DATA}",),
            "training.answer_only_loss=true",
        ]
        if options.draft_vocab is not None:
            lines.append((f"data.draft_vocab_cache={out.absolute() / VOCABULARY}",))
            lines.append(f"eagle.eagle_architecture_config.draft_vocab_size={options.draft_vocab}")
        return (
            f"# Train with ModelOpt\n\nIn `examples/speculative_decoding`:\n\n{shell_block(*lines)}"
            f"Auxiliary layers {self.trainer_layers}, counted from 0; vLLM's ids are "
            f"{self.source.vllm_layers}. Without `answer_only_loss` the trainer takes every token as "
            "supervised. The last layer is after the final norm.\n"
        )


def make(source: Source) -> ModelOpt:
    """Return the format."""
    return ModelOpt(source)
