"""Stops all work on a job: for a pause, cancel, failure or block."""

from dataclasses import replace

from schemas.job import JobState, Problem
from service.store.database import Transaction
from service.store.transitions import LockedJob, LockedTask, move_job, move_task, tasks_in
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
