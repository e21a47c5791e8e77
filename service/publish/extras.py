"""The dataset files that come from no unit: the counts of supervised tokens and the target's final norm."""

from collections import Counter
from pathlib import Path

from schemas.dataset.entries import FileEntry, entry_of
from schemas.dataset.seal import seal_bytes
from schemas.dataset.token_counts import packed_counts
from schemas.names import FINAL_NORM_PATH, token_freq_path
from service.errors import OptionRefused


def write_token_freq(dataset: Path, job_id: str, counts: Counter[int], attempt: str) -> FileEntry:
    """Seal the counts of how often each token id is supervised (`loss_mask` 1).

    Raises OSError, also if the folder `dataset` is missing.
    """
    path, content = token_freq_path(job_id), packed_counts(counts)
    seal_bytes(dataset / path, content, attempt, dataset)
    return entry_of(path, content)


def write_final_norm(dataset: Path, content: bytes, attempt: str) -> FileEntry:
    """Seal the target's final norm. Raises OptionRefused if the folder holds another model's.

    OSError, also where there is no folder `dataset`.
    """
    final = dataset / FINAL_NORM_PATH
    if final.exists():
        if final.read_bytes() != content:
            raise OptionRefused(
                f"{dataset.name} already holds the states of another model",
                field="model",
                cure="use another folder",
            )
    else:
        seal_bytes(final, content, attempt, dataset)
    return entry_of(FINAL_NORM_PATH, content)
