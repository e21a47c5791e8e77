r"""What crosses the socket between the service and the connector, one JSON document a line, both ways.

The service listens; every connector worker (one a rank) connects when the engine starts and says `Hello`. The
service opens a unit before it submits the unit's first request. Each rank answers a unit with exactly one
`UnitSealed` or `UnitFailed`. `UnitSealed` is the only proof of durability: it is sent after fsync, rename and
fsync of the folder.

    service                                connector (rank r)
      <-- Hello                            (or Refused: the engine's cache is not as expected)
      OpenUnit -->
      <-- UnitOpened                       (only now are the unit's requests submitted)
      SkipRow -->                          (a row the engine will never see)
      <-- UnitSealed | UnitFailed          (every row of rank r is written, rejected, void or skipped)
      AbandonUnit -->                      (lease lost or job cancelled: delete the temporary file; no answer)
      AskLoad -->                          (once a second)
      <-- RankLoad                         (also unasked, as the last line of a rank that is stopped)

Rows of a unit are spread over ranks by `row % num_ranks`. The service stops the engine only when every unit
it opened was answered or abandoned: the receipts are the flush barrier. A connector whose socket closes stops
its process, since nothing that a vanished service requested can be committed.
"""

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from schemas.base import Wire
from schemas.dataset.entries import LayerStats
from schemas.identity import Provenance
from schemas.names import JobId
from schemas.request import Compression


class AttemptId(Wire):
    """One attempt at one unit."""

    job_id: JobId
    unit: int = Field(ge=0)
    epoch: int = Field(ge=1)


class Hello(Wire):
    """The connector's first line: the engine's cache as it found it."""

    kind: Literal["hello"] = "hello"
    rank: int
    num_ranks: int
    engine_version: str
    device: str
    cache_shape: tuple[int, int, int, int]
    """`[B, L, S, H]`: blocks, captured layers, slots a block, hidden size."""


class Refused(Wire):
    """Sent instead of `Hello` if the engine's layout, dtype or version is not supported. The engine stops."""

    kind: Literal["refused"] = "refused"
    detail: str


class OpenUnit(Wire):
    """Begin the attempt with `num_rows` rows of the plan in its folder, which follows from the id."""

    kind: Literal["open"] = "open"
    attempt_id: AttemptId
    num_rows: int = Field(ge=1)
    compression: Compression
    provenance: Provenance


class SkipRow(Wire):
    """Row `row` will never reach the engine."""

    kind: Literal["skip"] = "skip"
    attempt_id: AttemptId
    row: int = Field(ge=0)


class AbandonUnit(Wire):
    """Forget the attempt."""

    kind: Literal["abandon"] = "abandon"
    attempt_id: AttemptId


class AskLoad(Wire):
    """Ask a rank for its `RankLoad`."""

    kind: Literal["ask-load"] = "ask-load"


class RankLoad(Wire):
    """What a rank holds now, and what it has done since its start: metrics of the worker."""

    kind: Literal["load"] = "load"
    rank: int
    pool_bytes: int = Field(description="Size of the pool that the rank drains into.")
    pool_used_bytes: int = Field(description="Bytes of the pool that hold rows.")
    pool_waiting_samples: int = Field(description="Rows whose blocks are held until the pool has room.")
    writers: int = Field(description="Writer threads.")
    writer_busy_seconds: float = Field(description="Seconds that writer threads have worked, together.")
    drained_samples: int = Field(description="Samples that were copied from the engine's cache.")
    drained_tokens: int = Field(description="Tokens that were copied from the engine's cache.")
    drained_bytes: int = Field(description="Bytes that were copied from the engine's cache.")


class UnitOpened(Wire):
    """Rank `rank` is ready for the rows of the attempt."""

    kind: Literal["opened"] = "opened"
    attempt_id: AttemptId
    rank: int


NOT_FINITE = "not-finite"
"""The reason of a row that holds NaN or infinity."""


class RejectedRow(Wire):
    """A row that the engine ran but that must not be stored, for example because it is not finite."""

    row: int
    reason: str
    detail: str


class UnitSealed(Wire):
    """The attempt is durable on rank `rank`. `file` is null when no row was written.

    `xxh3` (xxh3_128, hex) covers the bytes that were handed to the kernel. `footer_xxh3` covers the Parquet
    footer with its length and magic, and is compared before anything parses the footer. `rows[i]` is the plan
    row in row group `i` of the file, `num_tokens[i]` its length T.
    """

    kind: Literal["sealed"] = "sealed"
    attempt_id: AttemptId
    rank: int
    file: str | None
    xxh3: str
    footer_xxh3: str
    bytes: int
    rows: tuple[int, ...]
    num_tokens: tuple[int, ...]
    rejected: tuple[RejectedRow, ...] = ()
    void: tuple[int, ...] = Field(default=(), description="rows whose request was aborted, or failed")
    layers: tuple[LayerStats, ...] = ()


FailReason = Literal["write-failed", "states-wrong", "plan-unreadable", "internal"]


class UnitFailed(Wire):
    """The attempt cannot become durable. `errno` is the operating system's, if any (28: disk full)."""

    kind: Literal["failed"] = "failed"
    attempt_id: AttemptId
    rank: int
    reason: FailReason
    detail: str
    errno: int | None = None


ToConnector = Annotated[OpenUnit | SkipRow | AbandonUnit | AskLoad, Field(discriminator="kind")]
FromConnector = Annotated[
    Hello | Refused | UnitOpened | UnitSealed | UnitFailed | RankLoad, Field(discriminator="kind")
]

TO_CONNECTOR: TypeAdapter[ToConnector] = TypeAdapter(ToConnector)
FROM_CONNECTOR: TypeAdapter[FromConnector] = TypeAdapter(FromConnector)


def line(message: Wire) -> bytes:
    """Return `message` as one line of JSON, newline included."""
    return message.model_dump_json().encode() + b"\n"
