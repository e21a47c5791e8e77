"""A unit's frozen samples as one Parquet file in memory: the same samples give the same bytes."""

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import pyarrow as pa

from schemas.dataset.columns import DIALOGUE_FIELDS, LABEL_PREFIX, plan_schema, with_labels
from schemas.dataset.shard import LightRow
from schemas.dataset.tables import read_plan_table, table_bytes
from service.errors import WriteFailed
from service.plan.units import PlannedSample


def packed(samples: Sequence[PlannedSample]) -> bytes:
    """Return the content of a plan, compressed with zstd: about 2 to 4 bytes per token.

    Its schema is the `plan_schema` for what the samples have, with their labels.
    """
    hashed, dialogues = bool(samples[0].content_hash), [s.dialogue for s in samples if s.dialogue is not None]
    labels = list(samples[0].labels)
    columns: dict[str, list[Any]] = {
        "position": [sample.position for sample in samples],
        "sample_id": [sample.sample_id for sample in samples],
        "source_id": [sample.source_id for sample in samples],
        "prompt_tokens": [sample.prompt_tokens for sample in samples],
        "input_ids": [sample.ids for sample in samples],
        "loss_mask": [sample.mask for sample in samples],
        **{f"{LABEL_PREFIX}{name}": [sample.labels[name] for sample in samples] for name in labels},
    }
    if hashed:
        columns["content_hash"] = [sample.content_hash for sample in samples]
    for field in DIALOGUE_FIELDS if dialogues else ():
        columns[field.name] = [getattr(dialogue, field.name) for dialogue in dialogues]
    schema = plan_schema(hashed=hashed, in_dialogues=bool(dialogues))
    return _content(pa.table(columns, schema=with_labels(schema, labels)))


def as_written(plan: pa.Table, rows: Iterable[LightRow]) -> bytes:
    """Return the content of a plan whose rows are those that an attempt wrote, including answers.

    Rejected rows are left out.
    """
    places = {sample_id: place for place, sample_id in enumerate(plan["sample_id"].to_pylist())}
    in_order = sorted(rows, key=lambda row: places[row.sample_id])
    written = plan.take([places[row.sample_id] for row in in_order])
    for name in ("prompt_tokens", "input_ids", "loss_mask"):
        field, values = plan.schema.field(name), [getattr(row, name) for row in in_order]
        written = written.set_column(plan.schema.get_field_index(name), field, pa.array(values, field.type))
    return _content(written)


def _content(table: pa.Table) -> bytes:
    # One row group and no statistics: a unit is read whole.
    return table_bytes(table, write_statistics=False)


def unpacked(content: bytes, sha256: str) -> pa.Table:
    """Return a plan's samples. Raises WriteFailed if the content does not have this sha256."""
    digest = hashlib.sha256(content).hexdigest()
    if digest != sha256:
        detail = f"the plan of a unit has sha256 {digest}, it was stored as {sha256}"
        raise WriteFailed(detail, cure="restore a backup of the database, or submit a new job")
    return read_plan_table(pa.BufferReader(content))
