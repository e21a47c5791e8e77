"""What waits for a worker, and what workers have had for how long."""

from datetime import timedelta

from sqlalchemy import and_, exists, func, literal, or_, select

from service.store.database import Transaction
from service.store.policies import POLICIES
from service.store.tables import JOB, TASK
from service.store.values import TaskKind, TaskState


def runnable(tx: Transaction) -> dict[TaskKind, float]:
    """Return the longest time for which nothing has happened in a job of which a worker may take a task.

    In seconds, by the kind of task; 0 where no job waits, and for reports of jobs that have ended.
    """
    ages = dict.fromkeys(TaskKind, 0.0)
    for kind, policy in POLICIES.items():
        if policy.few:  # of jobs in which nothing happens any more
            continue
        due = or_(TASK.c.not_before.is_(None), TASK.c.not_before <= tx.now)
        waits = and_(TASK.c.state == TaskState.PENDING, due)
        # Its owner died without a word.
        expired = and_(TASK.c.state == TaskState.LEASED, TASK.c.lease_until <= tx.now)
        of_job = TASK.c.job_id == JOB.c.id, TASK.c.kind == kind
        last = select(func.min(JOB.c.updated_at)).where(JOB.c.state.in_(policy.job_states))
        since = tx.connection.scalar(
            last.where(or_(*(exists().where(*of_job, way) for way in (waits, expired))))
        )
        ages[kind] = max(tx.now - (since or tx.now), timedelta()).total_seconds()
    return ages


def leased(tx: Transaction) -> dict[tuple[TaskKind, str], float]:
    """Return the age in seconds of the oldest lease of each kind of task that each owner has."""
    # Word for word as in the condition of the index.
    state = TASK.c.state == literal(TaskState.LEASED, TASK.c.state.type, literal_execute=True)
    query = select(TASK.c.kind, TASK.c.owner, func.min(TASK.c.leased_at)).where(
        state, TASK.c.lease_until > tx.now
    )
    rows = tx.connection.execute(query.group_by(TASK.c.kind, TASK.c.owner))
    return {(kind, owner): max(tx.now - at, timedelta()).total_seconds() for kind, owner, at in rows}
