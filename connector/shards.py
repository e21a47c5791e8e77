"""One attempt's shard on one rank: rows in, one sealed Parquet file and its receipt out.

A `UnitWriter` is used by one writer thread; only `encode` may run on others. A layer stored uncompressed is
written to disk straight from the slab: after the gather, nothing copies a state.

Legend: T tokens, L captured layers, H hidden size.
"""

from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray

from connector.repeats import RepeatCheck
from connector.rowcheck import NotFiniteError, RowChecker, StatesWrongError
from connector.state_columns import state_columns
from connector.sums import Sums
from connector.wire import DrainConfig, DrainJob, hash_ids
from schemas.dataset.columns import METADATA_KEY, shard_schema
from schemas.dataset.entries import LayerStats
from schemas.dataset.framing import Cell, Page, ShardFile, pages
from schemas.dataset.seal import make_folder, seal, temporary
from schemas.dataset.tables import read_plan_table
from schemas.names import PLAN_FILE, attempt_dir, shard_file
from schemas.receipts import NOT_FINITE, OpenUnit, RejectedRow, UnitSealed


@dataclass(frozen=True, slots=True)
class EncodedRow:
    """A checked row and its pages, which are views of its slab; or the reason why it is rejected."""

    job: DrainJob
    ids: NDArray[np.int32]
    sums_LT: Sums
    readings: tuple[LayerStats, ...] = ()
    pages: tuple[Page, ...] = ()
    rejected: RejectedRow | None = None


class UnitWriter:
    """Writes the rows of one attempt that belong to this rank.

    Raises OSError, StatesWrongError, and pyarrow.ArrowException for a plan that cannot be read.
    """

    def __init__(self, order: OpenUnit, config: DrainConfig, repeats: RepeatCheck) -> None:
        """Read the unit's plan; the first row creates the file. `repeats` is shared by the whole engine."""
        self.attempt_id = order.attempt_id
        self._order = order
        identity = order.provenance.identity
        self.layer_ids = identity.layer_ids
        self._hidden_size = identity.hidden_size
        self._dtype = getattr(torch, identity.dtype)
        self._rank, self._repeats = config.rank, repeats
        folder = config.work_root / attempt_dir(
            order.attempt_id.job_id, order.attempt_id.unit, order.attempt_id.epoch
        )
        self._plan = read_plan_table(folder / PLAN_FILE)
        if self._plan.num_rows != order.num_rows:
            raise StatesWrongError(
                f"the plan holds {self._plan.num_rows} rows, the order says {order.num_rows}"
            )
        self._open_rows = {row for row in range(order.num_rows) if row % config.num_ranks == config.rank}
        self._final = folder / shard_file(order.attempt_id.unit, config.rank, config.num_ranks)
        self._schema = shard_schema(
            self.layer_ids, self._hidden_size, identity.dtype, order.compression
        ).with_metadata({METADATA_KEY: order.provenance.model_dump_json().encode()})
        self._file: ShardFile | None = None
        self._rows: list[int] = []
        self._num_tokens: list[int] = []
        self._rejected: list[RejectedRow] = []
        self._void: list[int] = []
        self._sum_rms = [0.0] * len(self.layer_ids)
        self._max_abs = [0.0] * len(self.layer_ids)

    @property
    def complete(self) -> bool:
        """Return whether every row of this rank is written, rejected, void or skipped."""
        return not self._open_rows

    def write(self, job: DrainJob, states_LTH: torch.Tensor, copied_LT: Sums) -> None:
        """Encode a row and append it."""
        self.append(self.encode(job, states_LTH, copied_LT))

    def encode(self, job: DrainJob, states_LTH: torch.Tensor, copied_LT: Sums) -> EncodedRow:
        """Check the row of `job` and make its pages in `states_LTH`'s memory, overwriting it. Thread-safe.

        `copied_LT` are the sums of the states as read by the copy. A row that is not finite, or has no
        supervised token, is rejected with a named reason instead.
        """
        row, checker = job.ref.row, RowChecker(self._dtype)
        look = checker.look(states_LTH)
        _refuse_changed(row, look.sums_LT, copied_LT, self.layer_ids)
        ids, mask = self._ids_and_mask(job)
        try:
            readings = checker.check(states_LTH, self.layer_ids, look)
        except NotFiniteError as error:
            rejected = RejectedRow(row=row, reason=NOT_FINITE, detail=str(error))
            return EncodedRow(job, ids, look.sums_LT, rejected=rejected)
        if not mask.any():
            detail = "the target's answer holds no token with a state"
            rejected = RejectedRow(row=row, reason="nothing-supervised", detail=detail)
            return EncodedRow(job, ids, look.sums_LT, rejected=rejected)
        light: list[Cell] = [
            self._plan["sample_id"][row].as_py(),
            self._plan["source_id"][row].as_py(),
            job.num_tokens,
            self._plan["prompt_tokens"][row].as_py() + job.ref.runs[0],
            self._hidden_size,
            ids,
            mask,
        ]
        # Lazily, one page at a time: a column's bytes may reuse the memory of the previous column.
        cells = chain(light, state_columns(self._order.compression, self.layer_ids, states_LTH, look))
        return EncodedRow(job, ids, look.sums_LT, readings, tuple(pages(self._schema, cells)))

    def append(self, encoded: EncodedRow) -> None:
        """Write an encoded row as one row group, and compare its states with those of other rows."""
        self._end_row(encoded.job.ref.row)
        if encoded.rejected is not None:
            self._rejected.append(encoded.rejected)
        else:
            self._append(encoded)
        if encoded.rejected is None or encoded.rejected.reason != NOT_FINITE:
            self._repeats.check(encoded.sums_LT, encoded.ids, self.layer_ids)

    def void(self, row: int) -> None:
        """Record that the engine ended `row` without its states."""
        self._end_row(row)
        self._void.append(row)

    def skip(self, row: int) -> None:
        """Record that `row` was never sent to the engine; rows of other ranks are ignored."""
        self._open_rows.discard(row)

    def seal(self) -> UnitSealed:
        """Close and seal the file and return its receipt, which is the proof of durability."""
        xxh3, footer_xxh3, num_bytes = "", "", 0
        if self._file is not None:
            xxh3, footer_xxh3, num_bytes = self._file.end()
            seal(self._final)
        return UnitSealed(
            attempt_id=self.attempt_id,
            rank=self._rank,
            file=self._final.name if self._file is not None else None,
            xxh3=xxh3,
            footer_xxh3=footer_xxh3,
            bytes=num_bytes,
            rows=tuple(self._rows),
            num_tokens=tuple(self._num_tokens),
            rejected=tuple(self._rejected),
            void=tuple(self._void),
            layers=self._stats() if self._file is not None else (),
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
        """Close and delete a file that is not sealed.

        Raises OSError only if the file system refuses the deletion.
        """
        if self._file is not None:
            self._file.close()
        temporary(self._final).unlink(missing_ok=True)

    def _append(self, encoded: EncodedRow) -> None:
        job = encoded.job
        if self._file is None:
            make_folder(self._final.parent)
            self._file = ShardFile(temporary(self._final), self._schema)
        self._file.write_row(encoded.pages)
        self._rows.append(job.ref.row)
        self._num_tokens.append(job.num_tokens)
        for index, reading in enumerate(encoded.readings):
            self._sum_rms[index] += reading.mean_rms * job.num_tokens
            self._max_abs[index] = max(self._max_abs[index], reading.max_abs)

    def _end_row(self, row: int) -> None:
        if row not in self._open_rows:
            raise StatesWrongError(f"row {row} came twice, or belongs to another rank")
        self._open_rows.remove(row)

    def _ids_and_mask(self, job: DrainJob) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
        """Return T token ids (int32) and T flags (uint8).

        The plan's come first, then those of the turns that follow it.
        """
        row = job.ref.row
        ids, mask = (self._plan[name][row].values.to_numpy() for name in ("input_ids", "loss_mask"))
        if job.ref.planned_tokens != len(ids) or hash_ids(ids) != job.planned_hash:
            raise StatesWrongError(f"row {row}: the engine ran other token ids than the plan's")
        if job.num_tokens != len(ids) + len(job.generated_ids):
            raise StatesWrongError(f"row {row}: {job.num_tokens} states for {len(ids)} planned token ids")
        if job.generated_ids:
            ids = np.concatenate([ids, np.asarray(job.generated_ids, dtype=np.int32)])
            mask = np.concatenate([mask, job.ref.mask_behind(len(job.generated_ids))])
        return ids, mask


def _refuse_changed(row: int, sums_LT: Sums, copied_LT: Sums, layer_ids: tuple[int, ...]) -> None:
    """Raise StatesWrongError if states in the slab are no longer those that were copied into it."""
    changed = np.argwhere(sums_LT != copied_LT)
    if len(changed):
        layer, token = changed[0]
        where = f"{len(changed)} of {sums_LT.size}, the first at token {token} of layer {layer_ids[layer]}"
        raise StatesWrongError(f"row {row}: states are no longer what was copied: {where}")
