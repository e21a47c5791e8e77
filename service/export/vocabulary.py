"""Draft vocabularies: the tokens that a drafter may propose, from the counts of the supervised tokens.

Legend: V target's vocabulary, D draft vocabulary.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch

from schemas.dataset.manifest import Manifest
from schemas.dataset.token_counts import TokenTally, read_counts
from schemas.names import token_freq_path
from service.errors import DatasetBroken, OptionRefused
from service.export.source import Source
from service.export.target import find_target
from service.reader import Row
from service.reader.files import read_file

COUNTS_FOLDER = "token_freq"


def token_counts(source: Source, rows: Iterable[Row] | None = None) -> dict[int, int]:
    """Return how often each token id is supervised, ordered by id.

    Args:
        source: the dataset; its `token_freq/` files are summed up, and its index is counted where a job has
            none.
        rows: the rows that are exported, where they are not all of the dataset's or are cut; those are
            counted. Their states are not read.

    Raises DatasetBroken if a file is not the one that its manifest names.
    """
    if rows is not None:
        tally = TokenTally()
        for row in rows:
            tally.add(row.input_ids[row.loss_mask == 1].numpy())
        return dict(sorted(tally.counts().items()))
    total: Counter[int] = Counter()
    for job, manifest in source.manifests.items():
        counts = _stored_counts(source, manifest, token_freq_path(job))
        if counts is None:
            return dict(sorted(source.rows.supervised_counts().items()))
        total.update(counts)
    return dict(sorted(total.items()))


def _stored_counts(source: Source, manifest: Manifest, path: str) -> Counter[int] | None:
    """Return the counts of one job from its file, or none if there is no such file."""
    entry = next((entry for entry in manifest.extras if entry.path == path), None)
    if entry is None or path not in source.files.find(COUNTS_FOLDER, ".parquet"):
        return None
    content = read_file(source.files, path)
    if hashlib.sha256(content).hexdigest() != entry.sha256:
        raise DatasetBroken(f"{path} is not the file that the manifest names", field="dataset")
    counts = read_counts(content, path)
    if counts.total() != manifest.totals.supervised_tokens:
        raise DatasetBroken(
            f"{path} counts {counts.total()} supervised tokens, the manifest "
            f"{manifest.totals.supervised_tokens}",
            field="dataset",
        )
    return counts


def draft_vocabulary(
    source: Source, counts: Callable[[], dict[int, int]] | None = None
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the `vocabulary_map` that the options ask for, or none; `counts` if not all are counted."""
    size = source.options.draft_vocab
    if size is None:
        return None
    target_size = find_target(source).vocab_size
    return vocabulary_map(counts() if counts is not None else token_counts(source), size, target_size)


def vocabulary_map(
    counts: dict[int, int], draft_size: int, target_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `d2t` int64 [D], target id minus draft id, and `t2d` bool [V], which target ids are kept.

    The most frequent tokens are kept, of equally frequent ones those of lower id; where fewer were seen, the
    lowest ids fill up. Raises OptionRefused (`draft_vocab`, `target`).
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
    return kept_D - torch.arange(draft_size), t2d_V


def save_npy(path: Path, tensor: torch.Tensor) -> None:
    """Write a tensor as NumPy's own file."""
    with path.open("wb") as file:
        np.save(file, tensor.numpy())
