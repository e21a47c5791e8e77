"""NeMo Automodel's EAGLE-3 cache: auxiliary states, and the target's distribution over the draft vocabulary.

This trainer's rows are shifted where every other one's are not: row t holds the states of token t beside
token t + 1, its mask, and what the target says after it. `position_mask` is 1 where token t + 1 is supervised
and the target's own best token after it is in the draft vocabulary: the trainer reads the distribution
nowhere else, so it is computed there alone and 0 elsewhere. Layers are counted from 0.

Legend: T tokens of a row, S tokens of every row in the cache, H hidden size, V target's vocabulary, D draft
vocabulary, P supervised tokens of a row behind its first.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from schemas.dataset.seal import sealing
from service.errors import OptionRefused
from service.export.formats.nemo_cache import NemoCache, rows_a_shard, sequence_length
from service.export.formats.specforge import need_three
from service.export.saving import save_safetensors, seal_json
from service.export.source import Source
from service.export.target import TargetFolder
from service.export.vocabulary import token_counts, vocabulary_map
from service.proof.head import Head
from service.reader import Row

VERSION = 2
_LOGITS_AT_ONCE = 2**26


@dataclass(frozen=True, slots=True)
class Eagle3Cache(NemoCache):
    """The files that `recipe_args.cached_target_path` of `train_eagle3` names.

    `kept_D` int64 [D] are the target ids of the draft vocabulary, ascending, `is_kept_V` bool [V] says which.
    """

    RECIPE = "train_eagle3"

    head: Head
    kept_D: torch.Tensor
    is_kept_V: torch.Tensor

    def tensors(self, row: Row) -> dict[str, torch.Tensor]:
        """Return a row's tensors, shifted as the trainer wants them."""
        ids_T, mask_T = row.input_ids[: self.seq_length], row.loss_mask[: self.seq_length]
        probs_TD, counts_T1 = self._probabilities(row.last(), mask_T)
        return {
            "input_ids": ids_T[1:],
            "attention_mask": torch.ones(len(ids_T), dtype=torch.int64),
            "loss_mask": mask_T[1:].long(),
            "aux_hidden_states": row.auxiliary(self.source.layers),
            "target_probs": probs_TD,
            "position_mask": counts_T1,
        }

    def _probabilities(
        self, last_TH: torch.Tensor, mask_T: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the target's distribution after each next token [T, D], and where it counts: bool [T, 1]."""
        places_P = mask_T[1:].nonzero().flatten()
        probs_TD = last_TH.new_zeros((len(mask_T), len(self.kept_D)))
        counts_T1 = torch.zeros((len(mask_T), 1), dtype=torch.bool)
        at_once = max(1, _LOGITS_AT_ONCE // self.head.vocab_size)
        for begin in range(0, len(places_P), at_once):
            some_P = places_P[begin : begin + at_once]
            logprobs_PV = self.head.logprobs(last_TH[some_P + 1])
            counts_T1[some_P, 0] = self.is_kept_V[logprobs_PV.argmax(dim=1)]
            probs_TD[some_P] = logprobs_PV[:, self.kept_D].softmax(dim=1).to(last_TH.dtype)
        return probs_TD, counts_T1

    def finish(self, out: Path) -> None:
        """Write the target's embedding, then the manifest, without which the cache is not read."""
        embedding_VH, _ = self.target.embedding_and_head()
        with sealing(out / "target_embeddings.safetensors") as temporary:
            save_safetensors(temporary, {"weight": embedding_VH})
        manifest = self.facts() | {
            "format_version": VERSION,
            "target_vocab_size": self.target.vocab_size,
            "draft_vocab_size": len(self.kept_D),
            "target_probs_topk": 0,
            "aux_hidden_dim": self.source.rows.about.hidden_size * len(self.source.layers),
            "aux_layer_ids": self.trainer_layers,
            "selected_token_ids": self.kept_D.tolist(),
            "input_data": f"quarry:{','.join(self.source.manifests)}",
            "split": None,
            "shuffle_seed": 0,
        }
        seal_json(out / "manifest.json", manifest)

    def last_note(self) -> str:
        """Return where the draft vocabulary is."""
        return f"The draft vocabulary's {len(self.kept_D)} token ids are in `manifest.json`."


def make(source: Source, target: TargetFolder, shard_bytes: int) -> Eagle3Cache:
    """Return the format. Raises OptionRefused (`draft_vocab`, `layers`, `target`), EngineRefused."""
    need_three(source)
    size = source.options.draft_vocab
    if size is None:
        raise OptionRefused(
            "this cache holds the probability of every token of the draft vocabulary, at every token",
            field="draft_vocab",
            cure="name its size in --draft-vocab, such as 8192",
        )
    head = Head.load(target.folder, source.identity.dtype)
    _check_norm(source, target, head)
    seq_length = sequence_length(source)
    d2t_D, is_kept_V = vocabulary_map(_counts(source, seq_length), size, target.vocab_size)
    return Eagle3Cache(
        source,
        target,
        seq_length,
        rows_a_shard(source, source.rows.about.hidden_size * len(source.layers) + size, shard_bytes),
        head,
        d2t_D + torch.arange(size),
        is_kept_V,
    )


def _counts(source: Source, seq_length: int) -> dict[int, int]:
    """Count the supervised tokens that are not cut off."""
    if max(source.rows.num_tokens) <= seq_length:
        return token_counts(source)
    whole = (source.rows.row(number) for number in range(len(source.rows)))
    cut = (
        replace(row, input_ids=row.input_ids[:seq_length], loss_mask=row.loss_mask[:seq_length])
        for row in whole
    )
    return token_counts(source, cut)


def _check_norm(source: Source, target: TargetFolder, head: Head) -> None:
    """Refuse a target whose final norm is not the dataset's."""
    norm = source.rows.row(0).norm
    alike = head.final_norm == norm.norm
    if not alike or not torch.equal(head.norm_weight, norm.weight_H.to(head.norm_weight.dtype)):
        raise OptionRefused(
            f"{target.folder} has another final norm than the dataset: it is another model",
            field="target",
            cure="name the folder of the model that the dataset was made with in --target",
        )
