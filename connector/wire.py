"""A rank's configuration, and the messages from the scheduler half to the worker half, one per step.

Only request ids go back.

Messages are small on purpose: block ids and counts. Token ids are sent only for tokens that are not in the
unit's plan (an answer that the target generated); the planned ones are sent as a hash that the writer
compares with the plan.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from schemas.receipts import AttemptId


@dataclass(frozen=True, slots=True)
class DrainConfig:
    """The configuration of one rank; it comes from the engine's start options, never from a request."""

    work_root: Path
    socket_path: Path
    pool_bytes: int
    writer_threads: int
    rank: int
    num_ranks: int
    engine_version: str


PARAMS_KEY = "quarry"
"""Our entry in a request's `kv_transfer_params`."""


@dataclass(frozen=True, slots=True)
class RowRef:
    """Identifies the row and attempt that a request is for.

    Carried in `kv_transfer_params`, since the engine renames requests.

    `planned_tokens` is how many leading tokens of the request come from the plan. `runs` are the lengths of
    the runs of tokens after them, alternately unsupervised and supervised, starting with unsupervised. The
    tokens after the last run continue the alternation, so that by default all of them are generated and
    supervised.
    """

    attempt_id: AttemptId
    row: int
    planned_tokens: int
    runs: tuple[int, ...] = (0,)

    def mask_behind(self, num_tokens: int) -> NDArray[np.uint8]:
        """Return the loss mask of the `num_tokens` tokens after the planned ones."""
        flags = np.arange(len(self.runs) + 1) % 2
        rest = num_tokens - sum(self.runs)
        if rest < 0:
            raise ValueError(f"{sum(self.runs)} tokens were to follow the planned ones, and {num_tokens} do")
        return np.repeat(flags, [*self.runs, rest]).astype(np.uint8)

    def params(self) -> dict[str, Any]:
        """Return the `kv_transfer_params` of the request: plain types, for msgpack."""
        return {
            PARAMS_KEY: [
                self.attempt_id.job_id,
                self.attempt_id.unit,
                self.attempt_id.epoch,
                self.row,
                self.planned_tokens,
                list(self.runs),
            ]
        }

    @classmethod
    def of(cls, params: dict[str, Any] | None) -> "RowRef | None":
        """Return the reference in `params`; None for a request that is not ours to capture."""
        if not params or PARAMS_KEY not in params:
            return None
        job_id, unit, epoch, row, planned_tokens, runs = params[PARAMS_KEY]
        return cls(AttemptId(job_id=job_id, unit=unit, epoch=epoch), row, planned_tokens, tuple(runs))


@dataclass(frozen=True, slots=True)
class DrainJob:
    """A finished request whose states are in the cache; its blocks are held until `req_id` is reported.

    `block_ids` are the cache-only group's, in token order; they hold `num_tokens` tokens, and the last block
    may be partly filled.
    """

    req_id: str
    ref: RowRef
    num_tokens: int
    block_ids: tuple[int, ...]
    planned_hash: int
    generated_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class VoidRow:
    """A request that ended without all its states: aborted, failed, or short of blocks."""

    ref: RowRef


@dataclass(slots=True)
class StepWork:
    """The work that one engine step hands to the worker half.

    `items` are in the order in which the requests finished. `fresh` are the blocks of the cache-only group
    that were allocated in this step and do not hold any states of their new request yet.
    """

    items: list[DrainJob | VoidRow] = field(default_factory=list)
    fresh: list[int] = field(default_factory=list)


def hash_ids(token_ids: Sequence[int]) -> int:
    """Return the xxh3_64 of token ids as int32 little-endian: equal on both sides of the wire."""
    return xxhash.xxh3_64_intdigest(np.asarray(token_ids, dtype="<i4").tobytes())
