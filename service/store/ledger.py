"""Every change of a job and of its units: locked first, checked against the legal moves, told as an event.

A job's row is the one lock of everything below the job, so that its counters are exact and its events are
numbered in the order in which they become visible: a listener that asks for what came after event n never
misses one.
"""

from dataclasses import dataclass, replace
from datetime import datetime
from typing import Literal

from sqlalchemy import insert, select, update
from sqlalchemy.engine import RowMapping

from schemas.events import Delay, Event
from schemas.identity import Identity, Provenance
from schemas.job import JOB_MOVES, UNIT_MOVES, JobState, Problem, Progress, UnitState
from service.errors import IdentityChanged, IllegalMove, NotFound
from service.store.database import Transaction
from service.store.migration import check_write
from service.store.tables import EVENT, JOB, UNIT


@dataclass(frozen=True, slots=True)
class LockedJob:
    """A job's row while this transaction keeps everybody else from changing it."""

    id: str
    publish_subject: str
    state: JobState
    progress: Progress
    problem: Problem | None
    identity: Identity | None
    provenance: Provenance | None
    hub_commit: str | None
    last_event: int

    @property
    def known_identity(self) -> Identity:
        """The identity. Raises IdentityChanged before planning has set it."""
        if self.identity is None:
            raise IdentityChanged(
                f"job {self.id} has no identity yet", cure="set the identity before the first unit"
            )
        return self.identity


@dataclass(frozen=True, slots=True)
class LockedUnit:
    """A unit's row while its job is locked."""

    unit: int
    state: UnitState
    epoch: int
    attempts: int
    silent_deaths: int
    owner: str | None
    lease_until: datetime | None
    num_samples: int
    num_tokens: int
    plan_sha256: str
    problem: Problem | None


UNIT_COLUMNS = [UNIT.c[name] for name in LockedUnit.__slots__]


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
    query = select(JOB).where(JOB.c.id == job_id).with_for_update()
    row = tx.connection.execute(query).mappings().one_or_none()
    check_write(tx)  # behind the lock: a migration that came first is seen, a later one waits
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
    delay: Delay | None = None,
) -> LockedJob:
    """Write the job as it is given here and the event that tells of it; return it with the event's number."""
    job = replace(job, last_event=job.last_event + 1)
    values = {
        "state": job.state,
        "problem": job.problem,
        "identity": job.identity,
        "provenance": job.provenance,
        "hub_commit": job.hub_commit,
        "last_event": job.last_event,
        "updated_at": tx.now,
        **job.progress.model_dump(),
    }
    tx.connection.execute(update(JOB).where(JOB.c.id == job.id).values(values))
    entry = Event(
        id=job.last_event,
        at=tx.now,
        kind=kind,
        state=job.state,
        progress=job.progress,
        problem=problem,
        message=message,
        delay=delay,
    )
    tx.connection.execute(insert(EVENT).values(job_id=job.id, id=entry.id, entry=entry))
    return job


def move_job(tx: Transaction, job: LockedJob, to: JobState, problem: Problem | None = None) -> LockedJob:
    """Move a locked job to a state. Raises IllegalMove."""
    if to not in JOB_MOVES[job.state]:
        origins = ", ".join(state for state in JobState if to in JOB_MOVES[state])
        raise IllegalMove(
            f"job {job.id} is {job.state} and cannot become {to}",
            field="state",
            cure=f"a job becomes {to} from: {origins}",
        )
    message = f"{job.state} -> {to}"
    return record(tx, replace(job, state=to, problem=problem), "state", message, problem)


def move_unit(
    tx: Transaction,
    job: LockedJob,
    before: LockedUnit,
    after: LockedUnit,
    problem: Problem | None = None,
    **deltas: int,
) -> LockedJob:
    """Write a unit of a locked job as `after`, and the job's counters changed by `deltas`.

    `problem` is what this move is due to, while `after.problem` may be an older one. Raises IllegalMove.
    """
    if after.state not in UNIT_MOVES[before.state]:
        raise IllegalMove(
            f"unit {before.unit} of job {job.id} is {before.state} and cannot become {after.state}"
        )
    values = {
        "state": after.state,
        "epoch": after.epoch,
        "attempts": after.attempts,
        "silent_deaths": after.silent_deaths,
        "owner": after.owner,
        "lease_until": after.lease_until,
        "problem": after.problem,
    }
    tx.connection.execute(
        update(UNIT).where(UNIT.c.job_id == job.id, UNIT.c.unit == after.unit).values(values)
    )
    message = f"unit {after.unit}: {before.state} -> {after.state} (epoch {after.epoch})"
    return record(tx, replace(job, progress=count(job.progress, **deltas)), "unit", message, problem)


def units_in(tx: Transaction, job: LockedJob, state: UnitState) -> list[LockedUnit]:
    """Return the units of a locked job that are in `state`, lowest first."""
    query = select(*UNIT_COLUMNS).where(UNIT.c.job_id == job.id, UNIT.c.state == state).order_by(UNIT.c.unit)
    return [LockedUnit(**row) for row in tx.connection.execute(query).mappings()]
