"""Draft vocabularies: the tokens that a drafter may propose, chosen by the counts of supervised tokens.

Legend: V target's vocabulary, D draft vocabulary.
"""

from collections.abc import Callable, Iterable

import torch

from schemas.dataset.token_counts import TokenTally
from service.errors import OptionRefused
from service.export.saving import Writers, save_torch
from service.export.source import Source
from service.export.target import find_target
from service.reader import Row

Counts = Callable[[Source], dict[int, int]]
"""Counts supervised tokens by id."""


def token_counts(source: Source) -> dict[int, int]:
    """Return how often each token id is supervised in the whole dataset, ordered by id."""
    return dict(sorted(source.rows.supervised_counts().items()))


def counts_of(rows: Iterable[Row]) -> dict[int, int]:
    """Return the same for these rows, if some are left out or truncated. Their states are not read."""
    tally = TokenTally()
    for row in rows:
        tally.add(row.input_ids[row.loss_mask == 1].numpy())
    return dict(sorted(tally.counts().items()))


def draft_vocabulary(source: Source, size: int, count: Counts = token_counts) -> dict[str, torch.Tensor]:
    """Return the `vocabulary_map` of `size` tokens."""
    target_size = find_target(source).vocab_size
    return vocabulary_map(count(source), size, target_size)


def vocabulary_map(counts: dict[int, int], draft_size: int, target_size: int) -> dict[str, torch.Tensor]:
    """Return `d2t` int64 [D], target id minus draft id, and `t2d` bool [V], which target ids are kept.

    The most frequent tokens are kept, with ties in favour of lower ids; if too few were seen, it is filled up
    with the lowest ids. Raises OptionRefused (`draft_vocab`, `target`).
    """
    if not 1 <= draft_size <= target_size:
        raise OptionRefused(
            f"a draft vocabulary of {draft_size} does not fit a target vocabulary of {target_size}",
            field="draft_vocab",
            cure=f"name 1 to {target_size}",
        )
    if counts and max(counts) >= target_size:
        raise OptionRefused(
            f"the dataset holds token {max(counts)}, the target's vocabulary has {target_size}",
            field="target",
            cure="name the folder of the model that the dataset was made with",
        )
    kept = sorted(counts, key=lambda token_id: (-counts[token_id], token_id))[:draft_size]
    seen = set(kept)
    kept += [token_id for token_id in range(target_size) if token_id not in seen][: draft_size - len(kept)]
    kept_D = torch.tensor(sorted(kept), dtype=torch.int64)
    t2d_V = torch.zeros(target_size, dtype=torch.bool)
    t2d_V[kept_D] = True
    return {"d2t": kept_D - torch.arange(draft_size), "t2d": t2d_V}


def vocabulary_file(name: str, source: Source) -> Writers:
    """Return the `draft_vocabulary` as one file of `torch.save`, if the options ask for one."""
    if (size := source.options.draft_vocab) is None:
        return {}
    return {name: lambda path: save_torch(path, draft_vocabulary(source, size))}
