"""NeMo Automodel has two caches, one per recipe: DSpark's and EAGLE-3's.

Both consist of shards of stacked rows of equal length, built in memory: every row is padded with zeros, or
truncated, to S tokens. Layers are numbered from 0; DSpark's may include the embeddings, -1.

DSpark's rows are un-shifted, with the target's embedding and head in a separate file; the last layer is after
the final norm, also if it is one of the auxiliary layers. EAGLE-3's auxiliary layers are all before it.

EAGLE-3's rows are shifted, unlike every other trainer's: row t has the states of token t with token t + 1,
its mask, and the target's distribution after it. `position_mask` is 1 where token t + 1 is supervised and the
target's most likely token after it is in the draft vocabulary. The distribution is computed only where token
t + 1 is supervised, and is 0 elsewhere: the trainer reads it only where `position_mask` is 1.

Legend: T tokens of a row, S tokens of every row in the cache, H hidden size, V target's vocabulary, D draft
vocabulary, P supervised tokens of a row after its first.
"""

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from service.errors import OptionRefused
from service.export.format import Format, RowFile, refuse_draft_vocab
from service.export.formats.specforge import need_three
from service.export.options import Algorithm
from service.export.saving import Writers, save_json, save_safetensors
from service.export.source import Source
from service.export.target import TargetFolder, find_target, refuse_another_model
from service.export.vocabulary import counts_of, token_counts, vocabulary_map
from service.proof.head import Head
from service.reader import Row

SHARD_BYTES = 2**28
"""Target size of a shard, which is built in memory."""
DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_LOGITS_AT_ONCE = 2**26


@dataclass(frozen=True, slots=True)
class NemoCache(Format):
    """Rows are in shards of `shard_size` rows, fewer in the last, each truncated or padded to S tokens."""

    target: TargetFolder
    seq_length: int
    shard_size: int

    def row_files(self) -> Iterator[RowFile]:
        """Yield the shards."""
        for number, begin in enumerate(range(0, len(self.source.rows), self.shard_size)):
            numbers = range(begin, min(begin + self.shard_size, len(self.source.rows)))
            yield RowFile(f"shard-{number:06d}.safetensors", numbers)

    def write(self, temporary: Path, rows: Iterable[Row]) -> None:
        """Stack a shard's rows in memory and write them."""
        stacked: dict[str, list[torch.Tensor]] = {}
        for row in rows:
            for name, tensor in self.tensors(row).items():
                stacked.setdefault(name, []).append(fitted(tensor, self.seq_length))
        save_safetensors(temporary, {name: torch.stack(tensors) for name, tensors in stacked.items()})

    @abstractmethod
    def tensors(self, row: Row) -> dict[str, torch.Tensor]:
        """Return a row's tensors, [T, ...] each."""

    def facts(self) -> dict[str, object]:
        """Return the entries about the rows that both manifests have."""
        return {
            "target_model": self.model,
            "seq_length": self.seq_length,
            "dtype": DTYPE_NAMES[self.source.rows.about.dtype],
            "num_samples": len(self.source.rows),
            "shard_size": self.shard_size,
        }


class DSparkCache(NemoCache):
    """The files in the folder `recipe_args.cached_target_path` of `train_dspark`."""

    def tensors(self, row: Row) -> dict[str, torch.Tensor]:
        """Return a row's tensors."""
        return {
            "input_ids": row.input_ids,
            "attention_mask": torch.ones(row.num_tokens, dtype=torch.int64),
            "loss_mask": row.loss_mask.long(),
            "target_hidden_states": self._auxiliary(row),
            "target_last_hidden_states": row.last_normed(),
        }

    def _auxiliary(self, row: Row) -> torch.Tensor:
        """Return the auxiliary states, the last layer's after the norm, as the trainer takes them."""
        states_TA = row.auxiliary(self.source.layers)
        if row.num_layers in self.source.layers:
            row.normed(states_TA[:, -self.source.rows.about.hidden_size :], in_place=True)
        return states_TA

    def beside(self, out: Path) -> Writers:
        """Return the target's weights, then the manifest, without which the cache is not read."""
        return {"target_weights.safetensors": self._write_weights, "manifest.json": self._write_manifest}

    def _write_weights(self, temporary: Path) -> None:
        embedding_VH, head = self.target.embedding_and_head()
        weights = {"embed_tokens.weight": embedding_VH, "lm_head.weight": head.weight_VH}
        save_safetensors(temporary, weights)

    def _write_manifest(self, temporary: Path) -> None:
        dataset = self.source.rows.about
        manifest = self.facts() | {
            "format_version": 1,
            "target_model_type": self.target.model_type,
            "target_vocab_size": self.target.vocab_size,
            "hidden_size": dataset.hidden_size,
            "num_hidden_layers": dataset.num_layers,
            "target_hidden_dim": dataset.hidden_size * len(self.source.layers),
            "target_last_hidden_dim": dataset.hidden_size,
            "target_layer_ids": self.trainer_layers,
            "train_data_path": f"quarry:{','.join(self.source.rows.manifests)}",
            "train_split": None,
            "shuffle_seed": 0,
            "mask_reasoning_content": False,
            "chat_template_sha256": self.source.identity.template_sha256,
            "complete": True,
        }
        save_json(temporary, manifest)


@dataclass(frozen=True, slots=True)
class Eagle3Cache(NemoCache):
    """The files in the folder `recipe_args.cached_target_path` of `train_eagle3`.

    `kept_D` int64 [D] are the target ids of the draft vocabulary, ascending; `is_kept_V` bool [V] marks them.
    """

    head: Head
    kept_D: torch.Tensor
    is_kept_V: torch.Tensor

    def tensors(self, row: Row) -> dict[str, torch.Tensor]:
        """Return a row's tensors, shifted as the trainer expects."""
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
        """Return the target's distribution after each next token [T, D], and where it counts, bool [T, 1]."""
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

    def beside(self, out: Path) -> Writers:
        """Return the target's embedding, then the manifest, without which the cache is not read."""
        return {"target_embeddings.safetensors": self._write_embedding, "manifest.json": self._write_manifest}

    def _write_embedding(self, temporary: Path) -> None:
        embedding_VH, _ = self.target.embedding_and_head()
        save_safetensors(temporary, {"weight": embedding_VH})

    def _write_manifest(self, temporary: Path) -> None:
        manifest = self.facts() | {
            "format_version": 2,
            "target_vocab_size": self.target.vocab_size,
            "draft_vocab_size": len(self.kept_D),
            "target_probs_topk": 0,
            "aux_hidden_dim": self.source.rows.about.hidden_size * len(self.source.layers),
            "aux_layer_ids": self.trainer_layers,
            "selected_token_ids": self.kept_D.tolist(),
            "input_data": f"quarry:{','.join(self.source.rows.manifests)}",
            "split": None,
            "shuffle_seed": 0,
        }
        save_json(temporary, manifest)


def make(source: Source) -> Format:
    """Return the format. Raises OptionRefused (`draft_vocab`, `layers`, `target`), EngineRefused."""
    target = find_target(source, with_weights=True)
    if not any(target.folder.glob("*.safetensors")):
        raise OptionRefused(
            f"{target.folder} holds no weights, and this trainer reads the target's embedding and head",
            field="target",
            cure="download the target and name its folder in --target",
        )
    refuse_another_model(source, target)
    if source.options.algorithm is Algorithm.EAGLE3:
        return _eagle3(source, target)
    refuse_draft_vocab(source, "DSpark drafts")
    width = source.rows.about.hidden_size * (len(source.layers) + 1)
    return DSparkCache(source, target, sequence_length(source), rows_a_shard(source, width))


def _eagle3(source: Source, target: TargetFolder) -> Eagle3Cache:
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
    seq_length = sequence_length(source)
    vocabulary = vocabulary_map(_counts(source, seq_length), size, target.vocab_size)
    return Eagle3Cache(
        source,
        target,
        seq_length,
        rows_a_shard(source, source.rows.about.hidden_size * len(source.layers) + size),
        head,
        vocabulary["d2t"] + torch.arange(size),
        vocabulary["t2d"],
    )


def _counts(source: Source, seq_length: int) -> dict[int, int]:
    """Count the supervised tokens that are not truncated."""
    if max(source.rows.num_tokens) <= seq_length:
        return token_counts(source)
    whole = (source.rows.row(number) for number in range(len(source.rows)))
    cut = (
        replace(row, input_ids=row.input_ids[:seq_length], loss_mask=row.loss_mask[:seq_length])
        for row in whole
    )
    return counts_of(cut)


def sequence_length(source: Source) -> int:
    """Return S: the length in the options, or that of the longest row."""
    return source.options.max_tokens or max(source.rows.num_tokens)


def rows_a_shard(source: Source, row_width: int) -> int:
    """Return how many rows of S tokens fit in a shard, at least one; a token has `row_width` floats."""
    row_bytes = sequence_length(source) * row_width * source.rows.about.dtype.itemsize
    return max(1, SHARD_BYTES // row_bytes)


def fitted(tensor: torch.Tensor, length: int) -> torch.Tensor:
    """Return a tensor [T, ...] truncated, or padded with zeros, to [length, ...]."""
    out = tensor.new_zeros((length, *tensor.shape[1:]))
    out[: len(tensor)] = tensor[:length]
    return out
