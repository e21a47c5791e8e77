"""What the store takes and gives: frozen values, so that no row, session or connection leaks out."""

from dataclasses import dataclass
from datetime import datetime

from schemas.dataset.manifest import FileEntry, SealedShard, UnitChecks
from schemas.identity import Identity, Provenance
from schemas.job import JobState, JobView, Problem, Progress, RejectView, UnitState
from schemas.receipts import UnitKey
from schemas.request import ExtractRequest


@dataclass(frozen=True, slots=True)
class JobRow:
    """A job as stored. `identity` is known from planning on, `provenance` from the first commit on."""

    id: str
    state: JobState
    request: ExtractRequest
    request_sha256: str
    idempotency_key: str
    progress: Progress
    problem: Problem | None
    identity: Identity | None
    provenance: Provenance | None
    hub_commit: str | None
    created_at: datetime
    updated_at: datetime

    def view(self) -> JobView:
        """Return what `GET /jobs/{id}` says of this job."""
        return JobView(
            id=self.id,
            state=self.state,
            model=self.request.model,
            source_kind=self.request.source.kind,
            request=self.request,
            progress=self.progress,
            problem=self.problem,
            identity_sha256=self.identity.sha256() if self.identity else None,
            hub_commit=self.hub_commit,
            created_at=self.created_at,
            updated_at=self.updated_at,
        )


@dataclass(frozen=True, slots=True)
class PlanLease:
    """The right to plan a job, until another epoch takes it.

    `identity` is what earlier epochs have fixed, null before that. `plan_sha256s` are the digests of the plan
    files of the units that they have added, in order from unit 0: nobody adds another but the lease's holder.
    """

    job_id: str
    epoch: int
    owner: str
    request: ExtractRequest
    identity: Identity | None
    plan_sha256s: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PlannedUnit:
    """A unit whose frozen samples are sealed in its plan file; `plan_sha256` is that file's."""

    unit: int
    num_samples: int
    num_tokens: int
    plan_sha256: str


@dataclass(frozen=True, slots=True)
class UnitLease:
    """The right to one attempt at a unit; `plan_sha256` is its plan file's.

    `attempts` counts this one and those before it that ended with a word.
    """

    key: UnitKey
    owner: str
    request: ExtractRequest
    identity: Identity
    num_samples: int
    num_tokens: int
    attempts: int
    plan_sha256: str


@dataclass(frozen=True, slots=True)
class UnitRow:
    """A unit as stored: `epoch` of the last lease, 0 before the first; `problem` of the last failed try.

    `attempts` ended with a word or go on; `silent_deaths` counts the workers that vanished with the unit.
    """

    unit: int
    state: UnitState
    epoch: int
    attempts: int
    num_samples: int
    num_tokens: int
    problem: Problem | None
    silent_deaths: int = 0


@dataclass(frozen=True, slots=True)
class UnitCommit:
    """What one attempt made of its unit: every sample of it stands in `shards` or in `rejects`.

    `num_tokens` and `supervised_tokens` count the tokens written. Paths are inside the dataset repository.
    """

    key: UnitKey
    provenance: Provenance
    shards: tuple[SealedShard, ...]
    index: FileEntry | None
    rejects: tuple[RejectView, ...]
    num_tokens: int
    supervised_tokens: int
    checks: UnitChecks


@dataclass(frozen=True, slots=True)
class PublishLease:
    """The right to publish a job, and to be the only one to commit to its repository.

    `provenance` is null where no unit was committed: every sample was rejected while planning.
    """

    job_id: str
    epoch: int
    owner: str
    request: ExtractRequest
    identity: Identity
    provenance: Provenance | None
