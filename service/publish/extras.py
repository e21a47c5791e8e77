"""The files of a dataset that no unit makes: the counts of supervised tokens and the target's final norm."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from connector.seal import sealing, sha256_of
from schemas.manifest import FileEntry
from schemas.names import FINAL_NORM_PATH, token_freq_path
from service.errors import DatasetBroken, OptionRefused

TOKEN_FREQ_SCHEMA = pa.schema(
    [pa.field("token_id", pa.int32(), nullable=False), pa.field("count", pa.int64(), nullable=False)]
)

Ids = NDArray[np.int64]


def file_entry(dataset: Path, path: str) -> FileEntry:
    """Return what the file at `path` below `dataset` is now. Raises OSError."""
    sha256, num_bytes = sha256_of(dataset / path)
    return FileEntry(path=path, sha256=sha256, bytes=num_bytes)


def write_token_freq(dataset: Path, job_id: str, indexes: Iterable[str]) -> tuple[FileEntry, int]:
    """Count the supervised tokens (`loss_mask` 1), by id, over the index files at paths `indexes`.

    Returns the sealed file, ordered by token id, and the sum of its counts. Raises DatasetBroken, OSError.
    """
    ids: Ids = np.empty(0, dtype=np.int64)
    counts: Ids = np.empty(0, dtype=np.int64)
    for supervised in _supervised(dataset, indexes):
        more, times = np.unique(supervised, return_counts=True)
        merged, position = np.unique(np.concatenate([ids, more]), return_inverse=True)
        total = np.zeros(len(merged), dtype=np.int64)
        np.add.at(total, position, np.concatenate([counts, times]))
        ids, counts = merged, total
    path = token_freq_path(job_id)
    columns = [pa.array(ids, pa.int32()), pa.array(counts, pa.int64())]
    with sealing(dataset / path) as temporary:
        pq.write_table(pa.table(columns, schema=TOKEN_FREQ_SCHEMA), temporary, compression="zstd")
    return file_entry(dataset, path), int(counts.sum())


def write_final_norm(dataset: Path, content: bytes) -> FileEntry:
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
        with sealing(final) as temporary:
            temporary.write_bytes(content)
    return file_entry(dataset, FINAL_NORM_PATH)


def _supervised(dataset: Path, indexes: Iterable[str]) -> Iterator[NDArray[np.int32]]:
    """Yield the supervised token ids, a batch of rows at a time."""
    for path in indexes:
        try:
            with pq.ParquetFile(dataset / path) as file:
                for batch in file.iter_batches(columns=["input_ids", "loss_mask"]):
                    ids, mask = (column.flatten().to_numpy() for column in batch.columns)
                    if len(ids) != len(mask):
                        raise DatasetBroken(f"{path} holds {len(ids)} token ids and {len(mask)} mask flags")
                    yield ids[mask == 1]
        except (FileNotFoundError, pa.ArrowInvalid) as error:
            raise DatasetBroken(f"{path} cannot be read: {error}") from error
