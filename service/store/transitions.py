"""Every change of a job and of its tasks: locked first, checked against legal moves, recorded as an event.

A job's row is the only lock for everything that belongs to the job, so that its counters are exact and its
events are numbered in the order in which they become visible: a listener that asks for events after n never
misses one.
"""

from dataclasses import dataclass, replace
from datetime import datetime
from typing import Literal

from sqlalchemy import bindparam, exists, func, insert, select, update
from sqlalchemy.engine import RowMapping

from schemas.events import Event, EventKind
from schemas.identity import Identity, Provenance
from schemas.job import JOB_MOVES, JobState, Problem, Progress
from schemas.webhook import REPORTED_JOB_STATES
from service.errors import IdentityChanged, IllegalMove, NotFound
from service.store.database import Transaction
from service.store.migration import check_behind_lock
from service.store.policies import POLICIES, task_name
from service.store.tables import EVENT, JOB, OPEN_WEBHOOK, TASK
from service.store.values import TASK_MOVES, TaskKind, TaskState

MAX_REPORTS = 1000
"""Maximum number of an owner's webhook reports that wait at the same time: each is retried for three days."""


@dataclass(frozen=True, slots=True)
class LockedJob:
    """A job's row, locked by this transaction."""

    id: str
    model: str
    publish_subject: str
    state: JobState
    progress: Progress
    problem: Problem | None
    identity: Identity | None
    provenance: Provenance | None
    hub_commit: str | None
    captured_at: datetime | None
    last_event: int
    schedule: int | None
    spool: int | None
    owner: str | None
    skips_canary: bool
    keeps_local: bool
    webhook: str | None

    @property
    def is_pushed(self) -> bool:
        """Whether the dataset is pushed to a repository."""
        return self.publish_subject != self.id

    @property
    def known_identity(self) -> Identity:
        """The identity. Raises IdentityChanged before planning has set it."""
        if self.identity is None:
            raise IdentityChanged(
                f"job {self.id} has no identity yet", cure="set the identity before the first unit"
            )
        return self.identity


@dataclass(frozen=True, slots=True)
class LockedTask:
    """A task's row while its job is locked."""

    job_id: str
    kind: TaskKind
    item: int
    subject: str
    state: TaskState
    epoch: int
    attempts: int
    deaths: int
    owner: str | None
    lease_until: datetime | None
    leased_at: datetime | None
    not_before: datetime | None
    problem: Problem | None


TASK_COLUMNS = [TASK.c[name] for name in LockedTask.__slots__]
WRITTEN = ("state", "problem", "identity", "provenance", "hub_commit", "captured_at", "last_event")
"""Columns of a job that an event may change, besides its progress."""
CHANGING = tuple(name for name in LockedTask.__slots__ if name not in ("job_id", "kind", "item", "subject"))
"""Columns of a task that a move may change."""
_LOCKING = select(JOB).where(JOB.c.id == bindparam("of_job")).with_for_update()


def progress_of(row: RowMapping) -> Progress:
    """Return the counters in a row of `job`."""
    return Progress(**{name: row[name] for name in Progress.model_fields})


def count(progress: Progress, **deltas: int) -> Progress:
    """Return `progress` with each named counter changed by its delta."""
    return progress.model_copy(
        update={name: getattr(progress, name) + delta for name, delta in deltas.items()}
    )


def lock_job(tx: Transaction, job_id: str) -> LockedJob:
    """Lock a job until the transaction ends. Raises NotFound, StoreUnavailable."""
    row = tx.connection.execute(_LOCKING, {"of_job": job_id}).mappings().one_or_none()
    check_behind_lock(tx)  # a migration that came first is seen, a later one waits
    if row is None:
        raise NotFound(f"there is no job {job_id}", field="job_id")
    names = [name for name in LockedJob.__slots__ if name != "progress"]
    return LockedJob(progress=progress_of(row), **{name: row[name] for name in names})


def record(
    tx: Transaction,
    job: LockedJob,
    kind: Literal["state", "progress", "unit"],
    message: str,
    problem: Problem | None = None,
    *,
    is_change: bool = True,
) -> LockedJob:
    """Write the job as given and an event for it; return the job with the event's number.

    If `is_change` is false, `updated_at` is kept: for ended jobs it is the time of their end.
    """
    job = replace(job, last_event=job.last_event + 1)
    values = {name: getattr(job, name) for name in WRITTEN} | job.progress.model_dump()
    values |= {"updated_at": tx.now} if is_change else {}
    tx.connection.execute(update(JOB).where(JOB.c.id == job.id).values(values))
    entry = Event(
        id=job.last_event,
        at=tx.now,
        kind=EventKind(kind),
        state=job.state,
        progress=job.progress,
        problem=problem,
        message=message,
    )
    tx.connection.execute(insert(EVENT).values(job_id=job.id, id=entry.id, entry=entry))
    return job


def move_job(tx: Transaction, job: LockedJob, to: JobState, problem: Problem | None = None) -> LockedJob:
    """Move a locked job to a state. Raises IllegalMove."""
    check_move(job.id, job.state, to)
    message = f"{job.state} -> {to}"
    job = record(tx, replace(job, state=to, problem=problem), "state", message, problem)
    if job.webhook is not None and to in REPORTED_JOB_STATES:
        is_room = reports(tx, job.owner) < MAX_REPORTS
        add_task(tx, job, TaskKind.WEBHOOK, job.last_event, is_open=is_room)
        if not is_room:
            text = f"webhook: not sent, since {MAX_REPORTS} reports of its owner wait"
            job = record(tx, job, "progress", text, problem, is_change=False)
    return job


def check_move(job_id: str, state: JobState, to: JobState) -> None:
    """Raise IllegalMove if a job in `state` cannot become `to`."""
    if to not in JOB_MOVES[state]:
        origins = ", ".join(state for state in JobState if to in JOB_MOVES[state])
        detail = f"job {job_id} is {state} and cannot become {to}"
        raise IllegalMove(detail, field="state", cure=f"a job becomes {to} from: {origins}")


def reports(tx: Transaction, owner: str | None) -> int:
    """Count the webhook reports of an owner's jobs that are not delivered yet."""
    of_owner = exists().where(JOB.c.id == TASK.c.job_id, JOB.c.owner.is_not_distinct_from(owner))
    query = select(func.count()).select_from(TASK).where(OPEN_WEBHOOK, of_owner)
    return tx.connection.execute(query).scalar_one()


def add_task(
    tx: Transaction,
    job: LockedJob,
    kind: TaskKind,
    item: int = 0,
    *,
    subject: str | None = None,
    not_before: datetime | None = None,
    epoch: int = 0,
    is_open: bool = True,
) -> None:
    """Add a task, pending or already done; it must not exist.

    `epoch` is the last epoch of a task that it replaces.
    """
    new = insert(TASK).values(
        job_id=job.id,
        kind=kind,
        item=item,
        subject=subject or f"{job.id}/{item}",
        state=TaskState.PENDING if is_open else TaskState.DONE,
        epoch=epoch,
        attempts=0,
        deaths=0,
        not_before=not_before,
    )
    tx.connection.execute(new)


def move_task(
    tx: Transaction,
    job: LockedJob,
    before: LockedTask,
    after: LockedTask,
    problem: Problem | None = None,
    **deltas: int,
) -> LockedJob:
    """Write a task of a locked job as `after`, and add `deltas` to the job's counters.

    `problem` is the reason for this move, while `after.problem` may be an older one. Raises IllegalMove.
    """
    if after.state not in TASK_MOVES[before.state]:
        raise IllegalMove(
            f"{task_name(before.kind, before.item)} is {before.state} and cannot become {after.state}"
        )
    values = {name: getattr(after, name) for name in CHANGING}
    same = (TASK.c.job_id == job.id) & (TASK.c.kind == after.kind) & (TASK.c.item == after.item)
    tx.connection.execute(update(TASK).where(same).values(values))
    of_units = POLICIES[after.kind].of_units
    if not of_units and problem is None:
        return job  # the job's own state shows it
    message = f"{task_name(after.kind, after.item)}: {before.state} -> {after.state} (epoch {after.epoch})"
    kind: Literal["unit", "progress"] = "unit" if of_units else "progress"
    return record(tx, replace(job, progress=count(job.progress, **deltas)), kind, message, problem)


def tasks_in(tx: Transaction, job: LockedJob, state: TaskState) -> list[LockedTask]:
    """Return the tasks of a locked job that are in `state`, lowest unit first."""
    query = select(*TASK_COLUMNS).where(TASK.c.job_id == job.id, TASK.c.state == state)
    rows = tx.connection.execute(query.order_by(TASK.c.kind, TASK.c.item)).mappings()
    return [LockedTask(**row) for row in rows]
