"""A unit's frozen samples as a sealed Parquet file: the same samples are the same bytes."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from schemas.dataset.columns import CONTENT_HASH_BYTES, HASHED_PLAN_SCHEMA, PLAN_SCHEMA, with_labels
from schemas.dataset.seal import sealing, sha256_of
from service.errors import writing
from service.plan.units import PlannedSample


def write_plan(path: Path, samples: Sequence[PlannedSample]) -> str:
    """Seal `samples` at `path`; return the file's sha256. Raises DiskFull, WriteFailed.

    The file is of `PLAN_SCHEMA`, or of `HASHED_PLAN_SCHEMA` where samples are hashed, with their labels.
    """
    with writing(f"the plan file {path.name}"):
        with sealing(path) as temporary:
            # One row group and no statistics: a unit is read whole.
            pq.write_table(_table(samples), temporary, compression="zstd", write_statistics=False)
        return sha256_of(path)[0]


def _table(samples: Sequence[PlannedSample]) -> pa.Table:
    columns: list[pa.Array] = [
        pa.array([sample.position for sample in samples], pa.int64()),
        pa.array([sample.sample_id for sample in samples], pa.string()),
        pa.array([sample.source_id for sample in samples], pa.string()),
        pa.array([sample.prompt_tokens for sample in samples], pa.int32()),
        _lists([sample.ids for sample in samples], PLAN_SCHEMA.field("input_ids").type),
        _lists([sample.mask for sample in samples], PLAN_SCHEMA.field("loss_mask").type),
    ]
    schema = PLAN_SCHEMA
    if samples[0].content_hash:
        columns.append(pa.array([sample.content_hash for sample in samples], pa.binary(CONTENT_HASH_BYTES)))
        schema = HASHED_PLAN_SCHEMA
    labels = list(samples[0].labels)
    columns += [pa.array([sample.labels[name] for sample in samples], pa.string()) for name in labels]
    return pa.Table.from_arrays(columns, schema=with_labels(schema, labels))


def _lists(values: Sequence[npt.NDArray[np.integer]], kind: pa.ListType) -> pa.ListArray:
    """Return one list a sample without making a Python object of each token."""
    ends = np.cumsum([0, *(len(value) for value in values)], dtype=np.int32)
    flat = pa.array(np.concatenate(values), kind.value_type)
    return pa.ListArray.from_arrays(pa.array(ends), flat, type=kind)
