"""States of a job with their legal moves, and how the HTTP routes show jobs."""

from datetime import datetime
from typing import Annotated, Literal

from pydantic import Field

from schemas.base import Count, OpenEnum, Wire
from schemas.dataset.entries import FileEntry, ShardEntry
from schemas.names import JobId
from schemas.source import SourceKind


class JobState(OpenEnum):
    """The state of a job. BLOCKED waits for a person or for disk space, PAUSED for a person to resume it.

    `resume` continues a job with everything it has committed.
    """

    QUEUED = "queued"
    RUNNING = "running"
    PUBLISHING = "publishing"
    COMPLETED = "completed"
    PAUSED = "paused"
    BLOCKED = "blocked"
    FAILED = "failed"
    CANCELLED = "cancelled"
    DELETING = "deleting"


_STOPPED = frozenset({JobState.FAILED, JobState.BLOCKED, JobState.CANCELLED, JobState.PAUSED})

JOB_MOVES: dict[JobState, frozenset[JobState]] = {
    JobState.QUEUED: _STOPPED | {JobState.RUNNING},
    JobState.RUNNING: _STOPPED | {JobState.PUBLISHING},
    JobState.PUBLISHING: _STOPPED | {JobState.COMPLETED},
    JobState.PAUSED: frozenset({JobState.QUEUED, JobState.CANCELLED}),
    JobState.BLOCKED: frozenset({JobState.QUEUED, JobState.CANCELLED}),
    JobState.FAILED: frozenset({JobState.QUEUED, JobState.DELETING}),
    JobState.CANCELLED: frozenset({JobState.QUEUED, JobState.DELETING}),
    JobState.COMPLETED: frozenset({JobState.DELETING}),
    JobState.DELETING: frozenset(),
}
"""Every legal move. `resume` is the move to QUEUED: planning and capture continue from committed work."""

STOPPED_JOB_STATES = frozenset({JobState.FAILED, JobState.CANCELLED})
"""Ended, unless somebody resumes it."""

ENDED_JOB_STATES = STOPPED_JOB_STATES | {JobState.COMPLETED, JobState.DELETING}

RESTING_JOB_STATES = ENDED_JOB_STATES | {JobState.BLOCKED, JobState.PAUSED}
"""States that no worker moves a job out of."""

Priority = Annotated[int, Field(ge=-100, le=100)]
"""Jobs with a higher priority run first; among equals, the oldest first."""


PROBLEM_MEDIA_TYPE = "application/problem+json"


class Problem(Wire):
    """RFC 9457 problem details. `type` is stable.

    `field` names the faulty field of the request, and `cure` says what to do.
    """

    type: str
    title: str
    status: int
    detail: str
    field: str | None = None
    cure: str | None = None


class Progress(Wire):
    """Counters of a job. A sample is planned once and ends up either written or rejected.

    `samples_known`: skipped because an earlier run of the schedule wrote them. `samples_given_up`: planned,
    but left to the schedule's next run. `units_stored`: for a pushed job, units in its repository; with
    `retention: consumed`, units that every consumer has. `bytes_gone`: the part of `bytes_written` in shards
    that no host of the service keeps any more.
    """

    plan_done: bool = False
    samples_planned: int = 0
    samples_written: int = 0
    samples_rejected: int = 0
    tokens_planned: int = 0
    tokens_written: int = 0
    bytes_written: int = 0
    units_planned: int = 0
    units_done: int = 0
    units_failed: int = 0
    samples_known: int = 0
    samples_given_up: int = 0
    units_stored: int = 0
    bytes_gone: int = 0

    @property
    def is_captured(self) -> bool:
        """Whether nothing is left to plan or to capture."""
        return self.plan_done and self.units_done == self.units_planned

    @property
    def wrote_nothing_new(self) -> bool:
        """Whether nothing was written because earlier runs had written it, or the source was empty."""
        return not self.samples_written and (self.samples_known > 0 or not self.samples_planned)


class JobSummary(Wire):
    """A job without its request, which may hold many samples."""

    id: JobId
    state: JobState
    priority: Priority = 0
    owner: str | None = Field(default=None, description="name of the key that submitted it")
    model: str
    source_kind: SourceKind
    progress: Progress
    problem: Problem | None = None
    identity_sha256: str | None = None
    repository: str | None = Field(default=None, description="Hub repository that it is pushed to")
    hub_commit: str | None = Field(default=None, description="commit of its repository with the whole job")
    created_at: datetime
    updated_at: datetime
    waits: str | None = Field(default=None, description="why no unit is being captured now, if known")


class JobPage(Wire):
    """A page of jobs, newest first; `next_cursor` is null on the last page."""

    jobs: tuple[JobSummary, ...]
    next_cursor: str | None = None


class UnitView(Wire):
    """A committed unit: its files by path in the dataset, and whether the folder or repository has them."""

    unit: int
    epoch: int
    shards: tuple[ShardEntry, ...]
    index: FileEntry | None
    in_folder: bool
    in_repository: bool


class UnitPage(Wire):
    """Units in commit order; pass `next_after` as `after` to get the units that follow, now or later.

    `folder` is the dataset's folder on the service's host, `repository` its Hub repository. An empty page
    with a `state` of completed is the last one.
    """

    units: tuple[UnitView, ...]
    next_after: int
    state: JobState
    folder: str | None = None
    repository: str | None = None


class ConsumerView(Wire):
    """A consumer that has all units up to `place`; forgotten if it is silent until `expires_at`."""

    name: str
    place: int
    seen_at: datetime
    expires_at: datetime | None


class ConsumerPage(Wire):
    """All consumers of a job, the slowest first."""

    consumers: tuple[ConsumerView, ...]


class RejectView(Wire):
    """A sample that is not in the dataset, and why. `position` counts the source's rows from 0.

    `turn`, counted from 1, is given for a conversation whose turns are separate rows.
    """

    position: Count
    source_id: str | None
    sample_id: str | None
    reason: str
    detail: str
    turn: Count = Field(default=0, exclude_if=lambda turn: not turn)


class RejectPage(Wire):
    """Rejected samples by position; `next_after` is the position to continue from, null on the last page."""

    rejects: tuple[RejectView, ...]
    next_after: int | None = None


class Health(Wire):
    """The answer of `GET /healthz` while the process is alive."""

    status: Literal["ok"] = "ok"


class Readiness(Health):
    """The answer of `GET /readyz` while the service can take jobs."""

    workers_lost: int = Field(
        description="workers of this service that keep exiting; they are restarted every ten minutes"
    )


class RowATurn(Wire):
    """Conversations whose turns must be separate rows; `tokens_once` counts each token only once."""

    conversations: int
    rows: int
    tokens: int
    tokens_once: int
    why: dict[str, int] = Field(description="number of conversations by what the template does")


class Estimate(Wire):
    """What a job would need.

    `bytes` is the size of the states as captured, `stored_bytes` as stored: null if it depends on their
    values.
    """

    samples: int
    rejected: int
    tokens: int
    bytes: int
    shards: int
    commits: int
    bytes_per_token: int
    layer_ids: tuple[int, ...]
    stored_bytes: int | None = None
    row_a_turn: RowATurn | None = Field(
        default=None, exclude_if=lambda rows: rows is None, description="set with `generate.turns: all`"
    )
