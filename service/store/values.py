"""The store's inputs and results: frozen values, so that no row, session or connection leaks out."""

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
SERVICE = -2
"""The number of the service among hosts, though it is no folder: it was seen when it last heard consumers.
-1 is `hosts.NOWHERE`.
"""
ALONE_AFTER = 3
"""After how many silent deaths a unit runs alone, and a plan rests: what is beside it does not share them."""


class TaskKind(StrEnum):
    """The kinds of work for a job.

    Plan its units, capture each of them, store captured units in its repository meanwhile, publish its
    dataset, report its ends to a webhook, and delete it.
    """

    PLAN = "plan"
    CAPTURE = "capture"
    STORE = "store"
    PUBLISH = "publish"
    DELETE = "delete"
    WEBHOOK = "webhook"


class TaskState(StrEnum):
    """The state of a task. A LEASED task has an owner and a deadline."""

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
"""LEASED -> LEASED is the next owner's epoch taking over an expired lease."""


@dataclass(frozen=True, slots=True)
class NewJob:
    """A job to submit. Its request is serialized and hashed before a transaction is opened."""

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
        """Make a job from a checked request; it skips samples that earlier runs of `schedule` wrote.

        `spool` is the number of the schedule whose posted samples it takes. `owner` is the name of the key
        that it was submitted with. `document` is the whole request as canonical JSON, for a `request` that
        has only the first of its inline samples.
        """
        document = document or request.canonical_json()
        digest = hashlib.sha256(document.encode()).hexdigest()
        return cls(job_id, idempotency_key, request, priority, schedule, spool, owner, document, digest)


@dataclass(frozen=True, slots=True)
class JobRow:
    """A job as stored, without its request.

    `identity` is known once planning has fixed it, `provenance` from the first commit on. `waits` says why no
    unit of it is being captured; `repository` is the Hub repository that it is pushed to.
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
        """Return the API's view of this job."""
        made: dict[str, Any] = {
            "identity_sha256": self.identity.sha256() if self.identity else None,
            "source_kind": SourceKind.kept(self.source_kind),
        }
        same = {name: getattr(self, name) for name in JobSummary.model_fields if name not in made}
        return JobSummary(**made, **same)


class LoneDeaths(Wire):
    """What speaks against a unit: engines that died on it while it ran alone, and states that are wrong.

    `sound` lists the workers whose engines had captured another unit before they died, `wrong` those whose
    engines got wrong states for it, alone or not; each as often as it happened.
    """

    sound: tuple[str, ...] = ()
    wrong: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The right to one attempt at a task, until a later epoch takes it over.

    `item` is the task's item: the unit of a capture, the host of a storing, the pass of a planning, the event
    of a webhook. `attempts` counts this attempt and earlier ones that reported how they ended. It was granted
    for `ttl_s` seconds. `model` is the name in the job's request.
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
        """Return the fields that identify the task in log lines."""
        unit = {"unit": self.item} if self.kind is TaskKind.CAPTURE else {}
        return {"job": self.job_id, "task": self.kind.value, **unit, "epoch": self.epoch}

    def fields(self) -> dict[str, Any]:
        """Return the fields that leases of every kind have."""
        return {name: getattr(self, name) for name in Lease.__slots__}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanLease(Lease):
    """The right to plan a job.

    `identity` is the one that earlier epochs have fixed, or None. `schedule` is the number of the schedule
    whose earlier runs' samples are skipped, `spool` of the schedule whose posted samples are taken. `grants`
    is what the job's owner may read, None if nothing is limited. `item` is the number of the pass over the
    source, from 0; `first_unit` and `first_position` are where it begins.
    """

    identity: Identity | None
    schedule: int | None
    spool: int | None
    grants: Grants | None
    first_unit: int
    first_position: int


@dataclass(frozen=True, slots=True)
class PlannedUnit:
    """A unit with its frozen samples; `plan` is packed by `plan.unit_plan`."""

    unit: int
    num_samples: int
    num_tokens: int
    plan: bytes = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitLease(Lease):
    """The right to one attempt at capturing a unit, with its frozen samples as in `PlannedUnit`.

    It must run alone if it `is_probe`, since the worker's engine has died on the model and captured nothing
    of it since, if it has `lone_deaths`: an engine died on it without another unit, or got it wrong, or
    after `ALONE_AFTER` silent `deaths` of workers that held it, with others beside it which may be to blame.
    If it `is_answered`, its samples already hold the target's answers. Its files stay on `host`, a number,
    until they are stored. `engine` is the name and version of the engine that the job was begun with, if it
    was begun.
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
    deaths: int
    is_probe: bool
    engine: str | None

    @property
    def runs_alone(self) -> bool:
        """Whether its worker holds no other unit meanwhile."""
        return self.is_probe or self.lone_deaths is not None or self.deaths >= ALONE_AFTER

    @property
    def answers_anew(self) -> bool:
        """Whether the target still has to answer: each attempt may get other answers."""
        return self.identity.generate is not None and not self.is_answered

    @property
    def state_bytes(self) -> int:
        """The maximum size of its states, as captured."""
        answers = self.identity.generate.max_tokens * self.num_samples if self.identity.generate else 0
        return (self.num_tokens + answers) * self.identity.state_bytes_per_token

    @property
    def attempt_id(self) -> AttemptId:
        """The id by which the connector and the files name the attempt."""
        return AttemptId(job_id=self.job_id, unit=self.item, epoch=self.epoch)


@dataclass(frozen=True, slots=True)
class UnitRow:
    """A unit as stored: `epoch` is the last lease's, 0 before the first; `problem` the last failed attempt's.

    `attempts` counts those that reported how they ended, and a running one; `deaths` counts workers that died
    holding the unit.
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
    """The files of a committed unit. Paths are relative to the dataset repository."""

    attempt_id: AttemptId
    shards: tuple[ShardEntry, ...]
    index: FileEntry | None

    @property
    def files(self) -> tuple[FileEntry, ...]:
        """The shards, and the index if there is one."""
        return self.shards if self.index is None else (*self.shards, self.index)


@dataclass(frozen=True, slots=True)
class UnitCommit(UnitFiles):
    """The result of one attempt at a unit: each of its samples is in `shards` or in `rejects`.

    `num_tokens` and `supervised_tokens` count the tokens written. `final_norm` is the content of the
    dataset's file of that name. `content_hashes` are the samples' hashes, concatenated, in a job of a
    schedule. `token_counts` says how often each token is supervised (`schemas.dataset.token_counts`). `plan`
    is the rows as written, for another attempt, if it differs from this attempt's plan. These last four are
    not read back. `is_stored` is true once the job's repository holds the files, which until then are on
    `host`.
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
    """The right to store a job's units captured on a host (`item`) in the job's repository."""

    identity: Identity
    provenance: Provenance


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishLease(Lease):
    """The right to publish a job, as the only publisher to its repository.

    `provenance` is None if no unit was committed because every sample was rejected while planning.
    `captured_at` is when the last unit was committed, or the plan was finished without units.
    """

    identity: Identity
    provenance: Provenance | None
    captured_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookLease(Lease):
    """The right to report the event `item` of a job to a URL; `job` is the job as of that event."""

    url: str
    job: JobSummary
