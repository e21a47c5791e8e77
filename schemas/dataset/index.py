"""A unit's light index: everything in its rows except the states."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from schemas.dataset.columns import INDEX_SCHEMA, LABEL_PREFIX, labels_of, with_labels
from schemas.dataset.entries import FileEntry
from schemas.dataset.errors import DatasetError
from schemas.dataset.seal import sealing, sha256_of
from schemas.dataset.shard import LightRow
from schemas.dataset.tables import read_table
from schemas.dataset.token_counts import TokenTally

_LIGHT_COLUMNS = ("sample_id", "source_id", "num_tokens", "prompt_tokens", "input_ids", "loss_mask")
_GROUP_ROWS = 512
"""Keeps a row group far below what the Hub's viewer reads at once, even with rows of 100k tokens."""

IndexRows = dict[tuple[str, int], dict[str, Any]]
"""An index file's rows as Python values, by (shard path, row in the shard)."""


Witness = tuple[tuple[int, float], ...]
"""The engine's most likely tokens after a row's last token with their log-probabilities, most likely
first.

The log-probabilities are of the raw logits, whatever token was sampled.
"""


def write_index(
    final: Path,
    path: str,
    shards: Mapping[str, Sequence[LightRow]],
    plan: pa.Table,
    witnesses: Mapping[int, Witness],
) -> tuple[FileEntry, Counter[int]]:
    """Seal the index of one unit at `final`, in plan order; the same inputs give the same bytes.

    Args:
        final: the final path of the file.
        path: its path inside the dataset repository.
        shards: the rows of the unit's sealed shards, in file order, by the shard's path in the repository.
        plan: the unit's frozen samples.
        witnesses: the engine's most likely tokens after each row's last token, by plan row.

    Returns:
        The file's entry, and how often each token is supervised in it.

    Raises:
        OSError: the index cannot be written.
    """
    place = {sample_id: row for row, sample_id in enumerate(plan["sample_id"].to_pylist())}
    rows = [
        (place[light.sample_id], shard_path, row, light)
        for shard_path, lights in shards.items()
        for row, light in enumerate(lights)
    ]
    rows.sort(key=lambda item: item[0])
    columns = {name: [getattr(light, name) for *_, light in rows] for name in _LIGHT_COLUMNS}
    supervised = [light.input_ids[light.loss_mask == 1] for *_, light in rows]
    tally = TokenTally()
    for ids in supervised:
        tally.add(ids)
    of_rows = [witnesses.get(plan_row) for plan_row, *_ in rows]
    labels = {name: plan[f"{LABEL_PREFIX}{name}"].to_pylist() for name in labels_of(plan.schema)}
    table = pa.table(
        {
            **columns,
            "supervised_tokens": [len(ids) for ids in supervised],
            "shard": [shard_path for _, shard_path, _, _ in rows],
            "row": [row for _, _, row, _ in rows],
            "top_tokens": [witness and [token for token, _ in witness] for witness in of_rows],
            "top_logprobs": [witness and [logprob for _, logprob in witness] for witness in of_rows],
            **{f"{LABEL_PREFIX}{name}": [values[row] for row, *_ in rows] for name, values in labels.items()},
        },
        schema=with_labels(INDEX_SCHEMA, labels),
    )
    with sealing(final) as temp:
        pq.write_table(table, temp, compression="zstd", row_group_size=_GROUP_ROWS, write_page_index=True)
    digest, num_bytes = sha256_of(final)
    return FileEntry(path=path, sha256=digest, bytes=num_bytes), tally.counts()


def read_index(file: Path) -> IndexRows:
    """Read all rows of an index file. Raises DatasetError."""
    try:
        table = read_table(file)
        table.validate(full=True)
        if not table.schema.equals(with_labels(INDEX_SCHEMA, labels_of(table.schema))):
            raise DatasetError("its columns are not those of an index")
        rows = table.to_pylist()
    except MemoryError as error:
        raise DatasetError("cannot be read in the memory that may be taken for it") from error
    except (pa.ArrowException, OSError) as error:
        raise DatasetError(f"cannot be read: {error}") from error
    indexed = {(row["shard"], row["row"]): row for row in rows}
    if len(indexed) != len(rows):
        raise DatasetError(f"{len(rows)} rows name {len(indexed)} rows of shards")
    return indexed
