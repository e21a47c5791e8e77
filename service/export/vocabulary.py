"""Draft vocabularies: the tokens that a drafter may propose, from the counts of the supervised tokens.

Legend: V target's vocabulary, D draft vocabulary.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from schemas.names import token_freq_path
from service.errors import DatasetBroken, OptionRefused
from service.export.source import Source


def token_counts(source: Source) -> dict[int, int]:
    """Return how often each token id is supervised in all rows of the export, ordered by id.

    From the dataset's `token_freq/` files. Raises DatasetBroken if they do not sum up to the manifests.
    """
    counts: dict[int, int] = {}
    for job, manifest in source.manifests.items():
        path = token_freq_path(job)
        try:
            table: Any = pq.read_table(source.files.open(path).arrow())
        except (OSError, pa.ArrowException) as error:
            raise DatasetBroken(f"{path} cannot be read: {error}", field="dataset") from error
        ids, times = table["token_id"].to_pylist(), table["count"].to_pylist()
        if sum(times) != manifest.totals.supervised_tokens:
            raise DatasetBroken(
                f"{path} counts {sum(times)} supervised tokens, the manifest "
                f"{manifest.totals.supervised_tokens}",
                field="dataset",
            )
        for token_id, count in zip(ids, times, strict=True):
            counts[token_id] = counts.get(token_id, 0) + count
    return dict(sorted(counts.items()))


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
