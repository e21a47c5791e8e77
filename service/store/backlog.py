"""How long tasks have waited for a worker, and how long workers have held theirs."""

from datetime import timedelta

from sqlalchemy import and_, exists, func, literal, or_, select

from service.store.database import Transaction
from service.store.policies import POLICIES
from service.store.tables import JOB, TASK
from service.store.values import TaskKind, TaskState


def runnable(tx: Transaction) -> dict[TaskKind, float]:
    """Return the longest time since anything happened in a job that has a task for a worker to take.

    In seconds, by kind of task; 0 if no job waits, and always for webhook reports.
    """
    ages = dict.fromkeys(TaskKind, 0.0)
    for kind, policy in POLICIES.items():
        if policy.few:  # webhook reports, whose jobs may have ended
            continue
        due = or_(TASK.c.not_before.is_(None), TASK.c.not_before <= tx.now)
        waits = and_(TASK.c.state == TaskState.PENDING, due)
        # Its owner died without releasing it.
        expired = and_(TASK.c.state == TaskState.LEASED, TASK.c.lease_until <= tx.now)
        of_job = TASK.c.job_id == JOB.c.id, TASK.c.kind == kind
        last = select(func.min(JOB.c.updated_at)).where(JOB.c.state.in_(policy.job_states))
        since = tx.connection.scalar(
            last.where(or_(*(exists().where(*of_job, way) for way in (waits, expired))))
        )
        ages[kind] = max(tx.now - (since or tx.now), timedelta()).total_seconds()
    return ages


def leased(tx: Transaction) -> dict[tuple[TaskKind, str], float]:
    """Return the age in seconds of each owner's oldest lease of each kind of task."""
    # Must be written exactly as in the condition of the index.
    state = TASK.c.state == literal(TaskState.LEASED, TASK.c.state.type, literal_execute=True)
    query = select(TASK.c.kind, TASK.c.owner, func.min(TASK.c.leased_at)).where(
        state, TASK.c.lease_until > tx.now
    )
    rows = tx.connection.execute(query.group_by(TASK.c.kind, TASK.c.owner))
    return {(kind, owner): max(tx.now - at, timedelta()).total_seconds() for kind, owner, at in rows}
