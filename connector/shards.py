"""One attempt's shard on one rank: rows in, one sealed Parquet file and its receipt out.

Single-threaded: a `UnitWriter` lives on one writer thread. A layer that is stored as it is is an Arrow view
of the slab's own memory, and the disk takes it from there: after the gather nothing copies a state.

Legend: T tokens, L captured layers, H hidden size.
"""

from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import xxhash
from numpy.typing import NDArray

from connector.rowcheck import Look, NotFinite, RowChecker, StatesWrongError
from connector.state_columns import StateColumns
from connector.wire import DrainJob, hash_ids
from schemas.dataset.columns import METADATA_KEY, PLAN_SCHEMA, shard_schema
from schemas.dataset.direct import DirectWriter
from schemas.dataset.framing import MAGIC, Framer
from schemas.dataset.manifest import LayerStats
from schemas.dataset.seal import make_folder, seal, temporary
from schemas.names import attempt_dir, plan_path, shard_file
from schemas.receipts import OpenUnit, RejectedRow, UnitSealed

ALIGNED_BYTES = 2**18
"""A value of so many bytes begins on a block's border: at most 1.6 % more file. A shorter one is copied."""


class UnitWriter:
    """Writes the rows of one attempt that fall to this rank.

    Raises OSError, pa.ArrowException and StatesWrongError.
    """

    def __init__(self, order: OpenUnit, work_root: Path, rank: int, num_ranks: int) -> None:
        """Read the unit's plan; the file is created with its first row."""
        self.key = order.key
        self._order = order
        identity = order.provenance.identity
        self.layer_ids = identity.layer_ids
        self._hidden_size = identity.hidden_size
        dtype = getattr(torch, identity.dtype)
        self._checker = RowChecker(dtype)
        self._columns = StateColumns(order.compression, self.layer_ids, self._hidden_size, dtype)
        self._rank = rank
        self._plan = pq.read_table(
            work_root / plan_path(order.key.job_id, order.key.unit), schema=PLAN_SCHEMA
        )
        if self._plan.num_rows != order.num_rows:
            raise StatesWrongError(
                f"the plan holds {self._plan.num_rows} rows, the order says {order.num_rows}"
            )
        self._open_rows = {row for row in range(order.num_rows) if row % num_ranks == rank}
        folder = work_root / attempt_dir(order.key.job_id, order.key.unit, order.key.epoch)
        self._final = folder / shard_file(order.key.unit, rank, num_ranks)
        self._schema = shard_schema(
            self.layer_ids, self._hidden_size, identity.dtype, order.compression
        ).with_metadata({METADATA_KEY: order.provenance.model_dump_json().encode()})
        self._framer = Framer(self._schema)
        self._file: DirectWriter | None = None
        self._rows: list[int] = []
        self._num_tokens: list[int] = []
        self._rejected: list[RejectedRow] = []
        self._void: list[int] = []
        self._sum_rms = [0.0] * len(self.layer_ids)
        self._max_abs = [0.0] * len(self.layer_ids)

    @property
    def complete(self) -> bool:
        """Say whether every row of this rank has come to an end."""
        return not self._open_rows

    def look(self, states_LTH: torch.Tensor) -> Look:
        """Read a row's states once, for every check of their values."""
        return self._checker.look(states_LTH)

    def write(
        self, job: DrainJob, states_LTH: torch.Tensor, look: Look | None = None
    ) -> NDArray[np.int32] | None:
        """Append the row of `job` as one row group, and return its token ids.

        A row that is not finite is rejected by name instead, and there is nothing to return. `look` is what
        `look` has shown of its states, where that was asked before.
        """
        row = job.ref.row
        self._end_row(row)
        planned = self._plan.slice(row, 1)
        ids, mask = self._ids_and_mask(job, planned)
        look = look or self.look(states_LTH)
        readings = self._checker.check(states_LTH, self.layer_ids, look)
        if isinstance(readings, NotFinite):
            detail = (
                f"layer {readings.layer_id} is not finite in {readings.num_tokens} of {job.num_tokens} tokens"
            )
            self._rejected.append(RejectedRow(row=row, reason="not-finite", detail=detail))
            return None
        if not mask.any():
            detail = "the target's answer holds no token with a state"
            self._rejected.append(RejectedRow(row=row, reason="nothing-supervised", detail=detail))
            return ids
        light = [
            planned["sample_id"].combine_chunks(),
            planned["source_id"].combine_chunks(),
            pa.array([job.num_tokens], pa.int32()),
            planned["prompt_tokens"].combine_chunks(),
            pa.array([self._hidden_size], pa.int32()),
            _one_list(ids, pa.int32()),
            _one_list(mask, pa.uint8()),
        ]
        checksums: list[int] = []
        columns = chain(light, self._columns.of(states_LTH, look.checksums, checksums), _late(checksums))
        if self._file is None:
            make_folder(self._final.parent)
            self._file = DirectWriter(temporary(self._final))
            self._file.write(MAGIC)
        self._append(self._file, columns)
        self._rows.append(row)
        self._num_tokens.append(job.num_tokens)
        for index, reading in enumerate(readings):
            self._sum_rms[index] += reading.mean_rms * job.num_tokens
            self._max_abs[index] = max(self._max_abs[index], reading.max_abs)
        return ids

    def void(self, row: int) -> None:
        """Note that the engine ended `row` without its states."""
        self._end_row(row)
        self._void.append(row)

    def skip(self, row: int) -> None:
        """Note that `row` never went to the engine; rows of other ranks are ignored."""
        self._open_rows.discard(row)

    def seal(self) -> UnitSealed:
        """Close, seal and receipt the file; the answer is the proof of durability."""
        file: str | None = None
        xxh3, footer, num_bytes = "", "", 0
        stats: tuple[LayerStats, ...] = ()
        if self._file is not None:
            tail = self._framer.tail()
            self._file.write(tail)
            xxh3, footer, num_bytes = self._file.end(), xxhash.xxh3_128_hexdigest(tail), self._file.position
            seal(self._final)
            file, stats = self._final.name, self._stats()
        return UnitSealed(
            key=self.key,
            rank=self._rank,
            file=file,
            xxh3=xxh3,
            footer_xxh3=footer,
            bytes=num_bytes,
            rows=tuple(self._rows),
            num_tokens=tuple(self._num_tokens),
            rejected=tuple(self._rejected),
            void=tuple(self._void),
            layers=stats,
        )

    def _stats(self) -> tuple[LayerStats, ...]:
        tokens = sum(self._num_tokens)
        return tuple(
            LayerStats(
                layer_id=layer_id, mean_rms=self._sum_rms[index] / tokens, max_abs=self._max_abs[index]
            )
            for index, layer_id in enumerate(self.layer_ids)
        )

    def discard(self) -> None:
        """Close and delete what is not sealed.

        Raises OSError only if the file system refuses the deletion.
        """
        if self._file is not None:
            self._file.close()
        temporary(self._final).unlink(missing_ok=True)

    def _append(self, file: DirectWriter, columns: Iterable[pa.Array]) -> None:
        """Append a row's values, each in a page of its own, written before the next is asked for."""
        for index, column in enumerate(columns):
            page = self._framer.page(index, column)
            if page.payload is not None and page.payload.nbytes >= ALIGNED_BYTES:
                file.pad(len(page.head))
            self._framer.place(page, file.position)
            file.write(page.head)
            if page.payload is not None:
                file.write(page.payload)
        self._framer.end_row()

    def _end_row(self, row: int) -> None:
        if row not in self._open_rows:
            raise StatesWrongError(f"row {row} came twice, or belongs to another rank")
        self._open_rows.remove(row)

    def _ids_and_mask(self, job: DrainJob, planned: pa.Table) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
        """Return T token ids (int32) and T flags (uint8).

        The plan's, then the generated ones, which are supervised.
        """
        ids = planned["input_ids"].combine_chunks().values.to_numpy()
        mask = planned["loss_mask"].combine_chunks().values.to_numpy()
        if job.ref.planned_tokens != len(ids) or hash_ids(ids) != job.planned_hash:
            raise StatesWrongError(f"row {job.ref.row}: the engine ran other token ids than the plan's")
        if job.num_tokens != len(ids) + len(job.generated_ids):
            raise StatesWrongError(
                f"row {job.ref.row}: {job.num_tokens} states for {len(ids)} planned token ids"
            )
        if job.generated_ids:
            ids = np.concatenate([ids, np.asarray(job.generated_ids, dtype=np.int32)])
            mask = np.concatenate([mask, np.ones(len(job.generated_ids), dtype=np.uint8)])
        return ids, mask


def _late(checksums: list[int]) -> Iterator[pa.Array]:
    """Yield the row's checksums as they are when they are asked for: after its layers."""
    yield _one_list(np.array(checksums, dtype=np.uint64), pa.uint64())


def _one_list(values: np.ndarray, kind: pa.DataType) -> pa.Array:
    """Return a list array of one value."""
    item = pa.array(values, kind)
    offsets = pa.array([0, len(item)], pa.int32())
    return pa.ListArray.from_arrays(offsets, item, type=pa.list_(pa.field("element", kind, nullable=False)))
