"""Stops all work on a job: for a pause, cancel, failure or block."""

from dataclasses import replace

from sqlalchemy import insert, select, update

from schemas.events import Event, EventKind
from schemas.job import JobState, Problem, Progress
from service.store.database import Transaction
from service.store.migration import check_behind_lock
from service.store.tables import EVENT, JOB, TASK
from service.store.transitions import (
    LockedJob,
    LockedTask,
    check_move,
    move_job,
    move_task,
    progress_of,
    tasks_in,
)
from service.store.values import TaskState

UNLEASED = {"state": TaskState.PENDING, "owner": None, "lease_until": None}
"""The columns of a task that nobody has leased."""


def void(task: LockedTask) -> LockedTask:
    """Return a leased task as pending again; the attempt was not at fault and does not count."""
    return replace(task, state=TaskState.PENDING, owner=None, lease_until=None, attempts=task.attempts - 1)


def stop(tx: Transaction, job: LockedJob, to: JobState, problem: Problem | None = None) -> LockedJob:
    """Move a locked job to a state in which nothing works on it, and void its leases. Raises IllegalMove."""
    job = move_job(tx, job, to, problem)
    for task in tasks_in(tx, job, TaskState.LEASED):
        job = move_task(tx, job, task, void(task))
    return job


def cancel_unread(tx: Transaction, job_id: str) -> None:
    """Cancel a job that cannot be read, with an event, so that whoever follows it ends.

    Nothing of its row is lost: once it can be read, it can be resumed. Raises IllegalMove.
    """
    readable = [JOB.c[name] for name in ("state", "last_event", *Progress.model_fields)]
    row = select(*readable).where(JOB.c.id == job_id).with_for_update()
    job = tx.connection.execute(row).mappings().one()
    check_behind_lock(tx)
    state = job["state"]
    if state is JobState.CANCELLED:
        return
    check_move(job_id, state, JobState.CANCELLED)
    ended = {"state": JobState.CANCELLED, "updated_at": tx.now, "last_event": job["last_event"] + 1}
    tx.connection.execute(update(JOB).where(JOB.c.id == job_id).values(ended))
    event = Event(
        id=job["last_event"] + 1,
        at=tx.now,
        kind=EventKind.STATE,
        state=JobState.CANCELLED,
        progress=progress_of(job),
        problem=None,
        message=f"{state} -> {JobState.CANCELLED}",
    )
    tx.connection.execute(insert(EVENT).values(job_id=job_id, id=event.id, entry=event))
    leased = TASK.c.job_id == job_id, TASK.c.state == TaskState.LEASED
    in_order = select(TASK.c.item).where(*leased).order_by(TASK.c.kind, TASK.c.item)
    tx.connection.execute(in_order.with_for_update())  # as whoever else locks several of them
    given_back = UNLEASED | {"attempts": TASK.c.attempts - 1}
    tx.connection.execute(update(TASK).where(*leased).values(given_back))
