"""A unit's frozen samples as one Parquet file in memory: the same samples are the same bytes."""

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from schemas.dataset.columns import DIALOGUE_FIELDS, HASH_FIELDS, PLAN_SCHEMA, plan_schema, with_labels
from schemas.dataset.shard import LightRow
from schemas.dataset.tables import read_plan_table
from service.errors import WriteFailed
from service.plan.units import PlannedSample


def packed(samples: Sequence[PlannedSample]) -> bytes:
    """Return the content of a plan, compressed by zstd: about 2 to 4 bytes a token.

    It is of the `plan_schema` of what the samples have, with their labels.
    """
    return _content(_table(samples))


def as_written(plan: pa.Table, rows: Iterable[LightRow]) -> bytes:
    """Return the content of a plan whose rows are those that an attempt wrote, answers included.

    What it rejected is left out.
    """
    places = {sample_id: place for place, sample_id in enumerate(plan["sample_id"].to_pylist())}
    in_order = sorted(rows, key=lambda row: places[row.sample_id])
    written = plan.take([places[row.sample_id] for row in in_order])
    for name in ("prompt_tokens", "input_ids", "loss_mask"):
        field, values = plan.schema.field(name), [getattr(row, name) for row in in_order]
        column = pa.array(values, field.type) if name == "prompt_tokens" else _lists(values, field.type)
        written = written.set_column(plan.schema.get_field_index(name), field, column)
    return _content(written)


def _content(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    # One row group and no statistics: a unit is read whole.
    pq.write_table(table, sink, compression="zstd", write_statistics=False)
    content: bytes = sink.getvalue().to_pybytes()
    return content


def unpacked(content: bytes, sha256: str) -> pa.Table:
    """Return a plan's samples. Raises WriteFailed if the content is not what was packed."""
    digest = hashlib.sha256(content).hexdigest()
    if digest != sha256:
        detail = f"the plan of a unit has sha256 {digest}, it was stored as {sha256}"
        raise WriteFailed(detail, cure="restore a backup of the database, or submit a new job")
    return read_plan_table(pa.BufferReader(content))


def _table(samples: Sequence[PlannedSample]) -> pa.Table:
    columns: list[pa.Array] = [
        pa.array([sample.position for sample in samples], pa.int64()),
        pa.array([sample.sample_id for sample in samples], pa.string()),
        pa.array([sample.source_id for sample in samples], pa.string()),
        pa.array([sample.prompt_tokens for sample in samples], pa.int32()),
        _lists([sample.ids for sample in samples], PLAN_SCHEMA.field("input_ids").type),
        _lists([sample.mask for sample in samples], PLAN_SCHEMA.field("loss_mask").type),
    ]
    hashed, dialogues = bool(samples[0].content_hash), [s.dialogue for s in samples if s.dialogue is not None]
    if hashed:
        columns += [
            pa.array([sample.content_hash for sample in samples], field.type) for field in HASH_FIELDS
        ]
    for field in DIALOGUE_FIELDS if dialogues else ():
        values = [getattr(dialogue, field.name) for dialogue in dialogues]
        columns.append(pa.array(values, field.type))
    schema = plan_schema(hashed=hashed, in_dialogues=bool(dialogues))
    labels = list(samples[0].labels)
    columns += [pa.array([sample.labels[name] for sample in samples], pa.string()) for name in labels]
    return pa.Table.from_arrays(columns, schema=with_labels(schema, labels))


def _lists(values: Sequence[npt.NDArray[np.integer]], kind: pa.ListType) -> pa.ListArray:
    """Return one list a sample without making a Python object of each token."""
    ends = np.cumsum([0, *(len(value) for value in values)], dtype=np.int32)
    flat = pa.array(np.concatenate(values), kind.value_type)
    return pa.ListArray.from_arrays(pa.array(ends), flat, type=kind)
