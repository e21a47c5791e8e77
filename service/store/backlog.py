"""What waits, and for how long: tasks for a worker or for their end, captured units for their storing."""

from datetime import datetime
from typing import NamedTuple

from sqlalchemy import exists, func, literal, or_, select

from service.store import storing
from service.store.database import Transaction
from service.store.policies import POLICIES
from service.store.tables import AT_WORK, AT_WORK_STATES, HOST, JOB, TASK, UNIT_COMMIT, WORKER
from service.store.values import HOME, TaskKind, TaskState


class Held(NamedTuple):
    """What a host has captured for repositories that do not have it yet, and its workers' `scratch_bytes`."""

    id: str
    name: str
    unstored_units: int
    unstored_bytes: int
    oldest_unstored_seconds: float
    scratch_used_bytes: int | None
    scratch_limit_bytes: int | None


def runnable(tx: Transaction) -> dict[TaskKind, float]:
    """Return the longest time for which nothing has happened in a job of which a worker may take a task.

    In seconds, by the kind of task; 0 where no job waits, and for reports of jobs that have ended.
    """
    ages = dict.fromkeys(TaskKind, 0.0)
    for kind, policy in POLICIES.items():
        if policy.few:  # of jobs in which nothing happens any more
            continue
        due = or_(TASK.c.not_before.is_(None), TASK.c.not_before <= tx.now)
        free = TASK.c.job_id == JOB.c.id, TASK.c.kind == kind, TASK.c.state == TaskState.PENDING, due
        last = select(func.min(JOB.c.updated_at)).where(JOB.c.state.in_(policy.job_states))
        last = last.where(AT_WORK) if policy.job_states <= AT_WORK_STATES else last
        ages[kind] = _age(tx, tx.connection.scalar(last.where(exists().where(*free))))
    return ages


def leased(tx: Transaction) -> dict[TaskKind, float]:
    """Return the age of the oldest lease of each kind in seconds; 0 where there is none."""
    # Word for word as in the condition of the index.
    state = TASK.c.state == literal(TaskState.LEASED, TASK.c.state.type, literal_execute=True)
    query = select(TASK.c.kind, func.min(TASK.c.leased_at)).where(state).group_by(TASK.c.kind)
    return dict.fromkeys(TaskKind, 0.0) | {kind: _age(tx, at) for kind, at in tx.connection.execute(query)}


def held(tx: Transaction) -> list[Held]:
    """Return what each host holds that has workers or anything, the data folder's first."""
    leaving = select(JOB.c.id).where(JOB.c.publish_subject != JOB.c.id, JOB.c.units_stored < JOB.c.units_done)
    sums = func.count(), func.sum(UNIT_COMMIT.c.num_bytes), func.min(UNIT_COMMIT.c.committed_at)
    waiting = ~UNIT_COMMIT.c.is_stored, UNIT_COMMIT.c.job_id.in_(leaving)
    by_host = select(UNIT_COMMIT.c.host, *sums).where(*waiting).group_by(UNIT_COMMIT.c.host)
    made = {host: sums for host, *sums in tx.connection.execute(by_host)}
    limits: dict[int, int | None] = {}
    there = select(WORKER.c.host, WORKER.c.status).where(WORKER.c.alive_until > tx.clock)
    for host, status in tx.connection.execute(there):
        limits[host] = min(filter(None, (limits.get(host), status.scratch_bytes)), default=None)
    known = select(HOST.c.number, HOST.c.id, HOST.c.name).where(HOST.c.number.in_({HOME, *limits, *made}))
    found = []
    for host, host_id, name in tx.connection.execute(known.order_by(HOST.c.number)):
        units, size, since = made.get(host, (0, 0, None))
        limit = limits.get(host)
        used = None if limit is None else storing.unstored(tx, host)[0]
        found.append(Held(host_id or "", name, units, int(size), _age(tx, since), used, limit))
    return found


def _age(tx: Transaction, since: datetime | None) -> float:
    return 0.0 if since is None else max((tx.now - since).total_seconds(), 0.0)
