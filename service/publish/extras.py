"""The dataset files that come from no unit: the counts of supervised tokens and the target's final norm."""

from collections import Counter
from pathlib import Path

from schemas.dataset.entries import FileEntry
from schemas.dataset.seal import seal_bytes, sha256_of
from schemas.dataset.token_counts import packed_counts
from schemas.names import FINAL_NORM_PATH, token_freq_path
from service.errors import OptionRefused


def file_entry(dataset: Path, path: str) -> FileEntry:
    """Return the entry of the current file at `path` below `dataset`. Raises OSError."""
    sha256, num_bytes = sha256_of(dataset / path)
    return FileEntry(path=path, sha256=sha256, bytes=num_bytes)


def write_token_freq(dataset: Path, job_id: str, counts: Counter[int], attempt: str = "") -> FileEntry:
    """Seal the counts of how often each token id is supervised (`loss_mask` 1).

    Raises OSError, also if the folder `dataset` is missing.
    """
    path = token_freq_path(job_id)
    seal_bytes(dataset / path, packed_counts(counts), attempt, dataset)
    return file_entry(dataset, path)


def write_final_norm(dataset: Path, content: bytes, attempt: str = "") -> FileEntry:
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
    return file_entry(dataset, FINAL_NORM_PATH)
