"""The files of a dataset that no unit makes: the counts of supervised tokens and the target's final norm."""

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from schemas.dataset.entries import FileEntry
from schemas.dataset.seal import sealing, sha256_of
from schemas.dataset.token_counts import TokenTally, write_counts
from schemas.names import FINAL_NORM_PATH, token_freq_path
from service.errors import DatasetBroken, OptionRefused


def file_entry(dataset: Path, path: str) -> FileEntry:
    """Return what the file at `path` below `dataset` is now. Raises OSError."""
    sha256, num_bytes = sha256_of(dataset / path)
    return FileEntry(path=path, sha256=sha256, bytes=num_bytes)


def write_token_freq(
    dataset: Path, job_id: str, indexes: Iterable[str], attempt: str = ""
) -> tuple[FileEntry, Counter[int]]:
    """Count the supervised tokens (`loss_mask` 1), by id, over the index files at paths `indexes`.

    An index holds what was sealed, answers included, so that every committed row is counted once. Returns the
    sealed file, ordered by token id, and what is in it. Raises DatasetBroken, OSError.
    """
    tally = TokenTally()
    for supervised in _supervised(dataset, indexes):
        tally.add(supervised)
    path, counts = token_freq_path(job_id), tally.counts()
    with sealing(dataset / path, attempt) as temporary:
        write_counts(temporary, counts)
    return file_entry(dataset, path), counts


def write_final_norm(dataset: Path, content: bytes, attempt: str = "") -> FileEntry:
    """Seal the target's final norm. Raises OptionRefused if the folder holds another model's, OSError."""
    final = dataset / FINAL_NORM_PATH
    if final.exists():
        if final.read_bytes() != content:
            raise OptionRefused(
                f"{dataset.name} already holds the states of another model",
                field="model",
                cure="use another folder",
            )
    else:
        with sealing(final, attempt) as temporary:
            temporary.write_bytes(content)
    return file_entry(dataset, FINAL_NORM_PATH)


def _supervised(dataset: Path, indexes: Iterable[str]) -> Iterator[NDArray[np.int32]]:
    """Yield the supervised token ids, a batch of rows at a time."""
    for path in indexes:
        try:
            with pq.ParquetFile(dataset / path, pre_buffer=False) as file:
                for batch in file.iter_batches(columns=["input_ids", "loss_mask"], use_threads=False):
                    ids, mask = (column.flatten().to_numpy() for column in batch.columns)
                    if len(ids) != len(mask):
                        raise DatasetBroken(f"{path} holds {len(ids)} token ids and {len(mask)} mask flags")
                    yield ids[mask == 1]
        except (FileNotFoundError, pa.ArrowInvalid) as error:
            raise DatasetBroken(f"{path} cannot be read: {error}") from error
