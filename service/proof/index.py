"""Writes a unit's light index: everything of its rows but the states, read back from the sealed shards.

Imports torch by way of the shard reader: import it lazily.
"""

import errno
from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from schemas.dataset.columns import INDEX_SCHEMA
from schemas.dataset.manifest import FileEntry
from schemas.dataset.seal import sealing, sha256_of
from service.errors import DatasetBroken, DiskFull, WriteFailed
from service.proof.logit_check import Witness
from service.proof.shard_reader import ShardReader

_LIGHT_COLUMNS = ("sample_id", "source_id", "num_tokens", "prompt_tokens", "input_ids", "loss_mask")
_GROUP_ROWS = 512
"""Keeps a row group far below what the Hub's viewer reads at once, even where rows have 100k tokens."""


def write_index(
    final: Path,
    path: str,
    shards: Sequence[tuple[Path, str]],
    plan_file: Path,
    witnesses: Mapping[int, Witness],
) -> tuple[FileEntry, int]:
    """Seal the index of one unit at `final`, in plan order; the same inputs give the same bytes.

    Args:
        final: where the file gets its name, durably.
        path: its path inside the dataset repository.
        shards: the unit's sealed shards, each with its path inside the repository.
        plan_file: the unit's frozen samples.
        witnesses: what the engine said after the last token of some rows, by plan row.

    Returns:
        The file's entry, and the number of supervised tokens in it.

    Raises:
        WriteFailed: a shard cannot be read back, or the index cannot be written.
        DiskFull: there is no space for the index.
    """
    try:
        planned = pq.read_table(plan_file, columns=["sample_id"]).column("sample_id").to_pylist()
        place = {sample_id: row for row, sample_id in enumerate(planned)}
        rows = []
        for file, shard in shards:
            with ShardReader(file) as reader:
                for row, light in enumerate(reader.light):
                    rows.append((place[light.sample_id], shard, row, light))
        rows.sort(key=lambda item: item[0])
        columns = {name: [getattr(light, name) for *_, light in rows] for name in _LIGHT_COLUMNS}
        supervised = [int(light.loss_mask.sum()) for *_, light in rows]
        said = [witnesses.get(plan_row) for plan_row, *_ in rows]
        table = pa.table(
            {
                **columns,
                "supervised_tokens": supervised,
                "shard": [shard for _, shard, _, _ in rows],
                "row": [row for _, _, row, _ in rows],
                "next_token": [witness and witness.next_token for witness in said],
                "next_logprob": [witness and witness.next_logprob for witness in said],
            },
            schema=INDEX_SCHEMA,
        )
        with sealing(final) as temp:
            options = {"compression": "zstd", "row_group_size": _GROUP_ROWS, "write_page_index": True}
            pq.write_table(table, temp, **options)
        digest, num_bytes = sha256_of(final)
    except (OSError, pa.ArrowException, DatasetBroken) as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFull(f"no space for the index {path}", cure="free some, resume the job") from error
        raise WriteFailed(f"the index {path} cannot be written: {error}") from error
    return FileEntry(path=path, sha256=digest, bytes=num_bytes), sum(supervised)
