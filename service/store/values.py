"""What the store takes and gives: frozen values, so that no row, session or connection leaks out."""

import hashlib
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any, Self

from schemas.base import Wire
from schemas.dataset.entries import FileEntry, ShardEntry
from schemas.dataset.manifest import UnitChecks
from schemas.identity import Identity, Provenance
from schemas.job import JobState, JobSummary, Problem, Progress, RejectView
from schemas.keys import Grants
from schemas.receipts import AttemptId
from schemas.request import ExtractRequest
from schemas.source import SourceKind

HOME = 0
"""The number of the host of the data folder, where jobs are planned and finished."""


class TaskKind(StrEnum):
    """What there is to do for a job.

    Plan its units, capture each of them, store those that are captured in its repository meanwhile, publish
    its dataset, report each end of it, and delete it.
    """

    PLAN = "plan"
    CAPTURE = "capture"
    STORE = "store"
    PUBLISH = "publish"
    DELETE = "delete"
    WEBHOOK = "webhook"


class TaskState(StrEnum):
    """Where a task is. A LEASED one has an owner and a deadline."""

    PENDING = "pending"
    LEASED = "leased"
    DONE = "done"
    FAILED = "failed"


TASK_MOVES: dict[TaskState, frozenset[TaskState]] = {
    TaskState.PENDING: frozenset({TaskState.LEASED}),
    TaskState.LEASED: frozenset({TaskState.DONE, TaskState.PENDING, TaskState.FAILED, TaskState.LEASED}),
    TaskState.FAILED: frozenset({TaskState.PENDING}),
    TaskState.DONE: frozenset(),
}
"""LEASED -> LEASED is the next owner's epoch taking over a lease that ran out."""


@dataclass(frozen=True, slots=True)
class NewJob:
    """A job to submit. Its request is written out and hashed before a transaction holds the database."""

    id: str
    idempotency_key: str
    request: ExtractRequest
    priority: int
    schedule: int | None
    spool: int | None
    owner: str | None
    request_json: str
    request_sha256: str

    @classmethod
    def of(
        cls,
        job_id: str,
        idempotency_key: str,
        request: ExtractRequest,
        priority: int = 0,
        schedule: int | None = None,
        spool: int | None = None,
        owner: str | None = None,
        document: str | None = None,
    ) -> Self:
        """Make one of a checked request; it leaves out what earlier runs of `schedule` wrote.

        `spool` is the number of the schedule whose posted samples it takes. `owner` is the name of the key
        that it came with. `document` is the whole request as canonical JSON, where `request` has the first
        alone of its inline samples.
        """
        document = document or request.canonical_json()
        digest = hashlib.sha256(document.encode()).hexdigest()
        return cls(job_id, idempotency_key, request, priority, schedule, spool, owner, document, digest)


@dataclass(frozen=True, slots=True)
class JobRow:
    """A job as stored, without its request.

    `identity` is known from planning on, `provenance` from the first commit on. `waits` says why no
    unit of it is captured; `repository` is the Hub's that it is pushed to.
    """

    id: str
    state: JobState
    priority: int
    owner: str | None
    model: str
    source_kind: str
    request_sha256: str
    progress: Progress
    problem: Problem | None
    identity: Identity | None
    provenance: Provenance | None
    hub_commit: str | None
    created_at: datetime
    updated_at: datetime
    repository: str | None
    waits: str | None

    def view(self) -> JobSummary:
        """Return what the API says of this job."""
        made: dict[str, Any] = {
            "identity_sha256": self.identity.sha256() if self.identity else None,
            "source_kind": SourceKind(self.source_kind),
        }
        same = {name: getattr(self, name) for name in JobSummary.model_fields if name not in made}
        return JobSummary(**made, **same)


class LoneDeaths(Wire):
    """Engines died on a unit that ran alone; `sound`: the workers of those that had captured another one."""

    sound: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The right to one attempt at a task, until another epoch takes it.

    `item` is the unit of a capture, else 0. `attempts` counts this attempt and earlier ones that reported
    how they ended. It was granted for `ttl_s`. `model` is what the job's request names.
    """

    kind: TaskKind
    job_id: str
    item: int
    epoch: int
    attempts: int
    owner: str
    ttl_s: float
    model: str

    def named(self) -> dict[str, object]:
        """Return what log lines say of the task."""
        unit = {"unit": self.item} if self.kind is TaskKind.CAPTURE else {}
        return {"job": self.job_id, "task": self.kind.value, **unit, "epoch": self.epoch}

    def fields(self) -> dict[str, Any]:
        """Return what a lease of every kind has."""
        return {name: getattr(self, name) for name in Lease.__slots__}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanLease(Lease):
    """The right to plan a job.

    `identity` is what earlier epochs have fixed, null before that. `schedule` is the number of that whose
    earlier runs' samples are left out, `spool` of that whose posted samples are taken. `grants` is what the
    job's owner may read, null where nothing is limited. `item` is the number of the pass over the source,
    from 0; `first_unit` and `first_position` are where it begins.
    """

    identity: Identity | None
    schedule: int | None
    spool: int | None
    grants: Grants | None
    first_unit: int
    first_position: int


@dataclass(frozen=True, slots=True)
class PlannedUnit:
    """A unit with its frozen samples; `plan` is what `plan.unit_plan` packs."""

    unit: int
    num_samples: int
    num_tokens: int
    plan: bytes = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitLease(Lease):
    """The right to one attempt at capturing a unit, with its frozen samples, as `PlannedUnit` has them.

    It must run alone if it `is_probe`, since the worker's engine has died and captured none since, and where
    `lone_deaths` are there: an engine died on it that had no other unit. If it `is_answered`, its samples
    hold the target's answers already. Its files stay on `host`, a number, until they are stored.
    """

    identity: Identity
    skips_canary: bool
    keeps_local: bool
    host: int
    is_answered: bool
    num_samples: int
    num_tokens: int
    plan: bytes = field(repr=False)
    plan_sha256: str
    lone_deaths: LoneDeaths | None
    is_probe: bool

    @property
    def state_bytes(self) -> int:
        """What its states take at most, as captured."""
        answers = self.identity.generate.max_tokens * self.num_samples if self.identity.generate else 0
        return (self.num_tokens + answers) * self.identity.state_bytes_per_token

    @property
    def attempt_id(self) -> AttemptId:
        """The attempt, as the connector and the files name it."""
        return AttemptId(job_id=self.job_id, unit=self.item, epoch=self.epoch)


@dataclass(frozen=True, slots=True)
class UnitRow:
    """A unit as stored: `epoch` of the last lease, 0 before the first; `problem` of the last failed try.

    `attempts` reported how they ended or go on; `deaths` counts the workers that vanished with the unit.
    """

    unit: int
    state: TaskState
    epoch: int
    attempts: int
    num_samples: int
    num_tokens: int
    problem: Problem | None
    deaths: int = 0


@dataclass(frozen=True, slots=True)
class UnitFiles:
    """The files of a unit that is committed. Paths are inside the dataset repository."""

    attempt_id: AttemptId
    shards: tuple[ShardEntry, ...]
    index: FileEntry | None

    @property
    def files(self) -> tuple[FileEntry, ...]:
        """The shards, and the index if there is one."""
        return self.shards if self.index is None else (*self.shards, self.index)


@dataclass(frozen=True, slots=True)
class UnitCommit(UnitFiles):
    """What one attempt made of its unit: every sample of it stands in `shards` or in `rejects`.

    `num_tokens` and `supervised_tokens` count the tokens written.
    `final_norm` is the content of the dataset's file of that name. `content_hashes` are those of
    the samples, one after another, in a job of a schedule. `token_counts` say how often each token is
    supervised (`schemas.dataset.token_counts`). `plan` is what another attempt would capture, if not what
    this one did: the rows as they were written. None of these is read back. `is_stored` once the job's
    repository holds its files, which until then lie on `host`.
    """

    provenance: Provenance
    rejects: tuple[RejectView, ...]
    num_tokens: int
    supervised_tokens: int
    checks: UnitChecks
    final_norm: bytes = b""
    content_hashes: bytes = b""
    token_counts: bytes = b""
    plan: bytes = b""
    is_stored: bool = False
    host: int = HOME


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreLease(Lease):
    """The right to store a job's captured units of a host, its `item`, in the job's repository."""

    identity: Identity
    provenance: Provenance


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishLease(Lease):
    """The right to publish a job, and to be the only one to commit to its repository.

    `provenance` is null where no unit was committed: every sample was rejected while planning. `captured_at`
    is when the last unit was committed, or the plan was done without one.
    """

    identity: Identity
    provenance: Provenance | None
    captured_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookLease(Lease):
    """The right to report the event `item` of a job to a URL; `job` is the job as it was then."""

    url: str
    job: JobSummary


@dataclass(frozen=True, slots=True, kw_only=True)
class DeletionLease(Lease):
    """The right to delete a job that has ended, and its dataset here or not."""

    with_dataset: bool
