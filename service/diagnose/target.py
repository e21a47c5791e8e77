"""The target: the weights that a drafter shares, its predictions, and what a drafter may have learnt instead.

Legend: T tokens, K drafted tokens, R places, V vocabulary, H hidden size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from service.export.source import Source
from service.export.target import find_target, refuse_another_model
from service.plan.model_folder import TOKENIZER_FILES, files_digest
from service.proof.head_weights import HeadWeights
from service.reader import Row

_TOKENS = 256
"""How many tokens' logits are computed at once."""


@dataclass(frozen=True, slots=True)
class TargetWeights:
    """The target's embedding and head, float32. `folder` has its config and tokenizer.

    `same_tokenizer` is whether its tokenizer and template are those that the dataset was made with.
    """

    folder: Path
    num_layers: int
    embedding_VH: torch.Tensor
    head: HeadWeights
    same_tokenizer: bool = True

    @property
    def vocab_size(self) -> int:
        """V."""
        return len(self.head.weight_VH)

    def logits(self, normed_TH: torch.Tensor, weight_VH: torch.Tensor | None = None) -> torch.Tensor:
        """Return the logits [T, V] of states after the final norm, with another head if given `weight_VH`."""
        if weight_VH is not None:
            return self.head.shaped(normed_TH.float() @ weight_VH.T, None)
        bias_V = None if self.head.bias_V is None else self.head.bias_V.float()
        return self.head.shaped(normed_TH.float() @ self.head.weight_VH.T, bias_V)

    def likeliest(self, row: Row) -> torch.Tensor:
        """Return the most likely next token [T] after each token of a row."""
        parts = torch.split(row.last(), _TOKENS)
        return torch.cat([self.logits(row.normed(part)).argmax(-1) for part in parts])


def read_target(source: Source) -> TargetWeights:
    """Read the target of a dataset. Raises OptionRefused (`target`), EngineRefused, UnknownModel."""
    found = find_target(source, with_weights=True)
    refuse_another_model(source, found)
    same_tokenizer = files_digest(found.folder, TOKENIZER_FILES) == source.identity.tokenizer_sha256
    return TargetWeights(
        found.folder, source.rows.about.num_layers, *found.embedding_and_head(), same_tokenizer
    )


@dataclass(frozen=True, slots=True)
class Objective:
    """A distribution that a drafter may have learnt, and the cure if it is the wrong one.

    It is computed from the states of `layer`, normed `norms` times, `by` tokens off, of the row or another
    row.
    """

    name: str
    cure: str
    layer: int
    by: int = 0
    norms: int = 1
    head_VH: torch.Tensor | None = None
    of_another: bool = False

    def probabilities(self, target: TargetWeights, row: Row, other: Row, of_KR: torch.Tensor) -> torch.Tensor:
        """Return the probabilities [K, R, V] at positions `of_KR`; those beyond the row are arbitrary."""
        row = other if self.of_another else row
        states_TH = row.layer(self.layer)
        states_TH = states_TH[(of_KR.flatten() + self.by) % len(states_TH)]
        for _ in range(self.norms):
            states_TH = row.normed(states_TH)
        parts = [target.logits(part, self.head_VH).softmax(-1) for part in torch.split(states_TH, _TOKENS)]
        return torch.cat(parts).view(*of_KR.shape, -1)


def objectives(target: TargetWeights, layer_ids: Sequence[int]) -> list[Objective]:
    """Return the objectives possible with the layers of a dataset; the right one is first."""
    last = target.num_layers
    token = "train on the target's token t + 2 where token t + 1 is fed"  # noqa: S105 - words
    every = (
        Objective("the target's distribution", "", last),
        Objective(
            "the final norm applied twice", "give the trainer the last layer before its norm", last, norms=2
        ),
        Objective(
            "no final norm", "give the trainer the final norm, or the last layer after it", last, norms=0
        ),
        Objective("the layer below the last", "take the last layer by vLLM's id N, not N - 1", last - 1),
        Objective("one token earlier", token, last, by=-1),
        Objective("one token later", token, last, by=1),
        Objective(
            "the embeddings as head", "give the trainer lm_head.weight", last, head_VH=target.embedding_VH
        ),
        Objective(
            "another row's", "make the data anew: each row's states of its own tokens", last, of_another=True
        ),
    )
    return [one for one in every if one.layer in layer_ids]
