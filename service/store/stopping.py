"""Taking a job away from everybody who works on it, for cancel, failure and block alike."""

from dataclasses import replace

from schemas.job import JobState, Problem
from service.store.database import Transaction
from service.store.transitions import LockedJob, LockedTask, move_job, move_task, tasks_in
from service.store.values import TaskState

UNLEASED = {"state": TaskState.PENDING, "owner": None, "lease_until": None}
"""What the columns of a task hold that nobody has."""


def void(task: LockedTask) -> LockedTask:
    """Return a leased task as it waits for its next attempt; this one was not at fault and does not count."""
    return replace(task, state=TaskState.PENDING, owner=None, lease_until=None, attempts=task.attempts - 1)


def stop(tx: Transaction, job: LockedJob, to: JobState, problem: Problem | None = None) -> LockedJob:
    """Move a locked job to a state in which nobody works on it, and void its leases. Raises IllegalMove."""
    job = move_job(tx, job, to, problem)
    for task in tasks_in(tx, job, TaskState.LEASED):
        job = move_task(tx, job, task, void(task))
    return job
