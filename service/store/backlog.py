"""What waits, and for how long: tasks for a worker or for their end, captured units for their storing."""

from typing import NamedTuple

from sqlalchemy import exists, func, literal, or_, select

from schemas.worker import WorkerStatus
from service.store import storing
from service.store.database import Transaction
from service.store.policies import POLICIES
from service.store.tables import AT_WORK, AT_WORK_STATES, HOST, JOB, TASK, UNIT_COMMIT, WORKER
from service.store.values import HOME, TaskKind, TaskState


class Held(NamedTuple):
    """What a host has captured for repositories that do not have it yet.

    `oldest_s` is the age of the first of it. `used_bytes` count against `limit_bytes`, its workers'
    `scratch_bytes`; both are null without that.
    """

    id: str
    name: str
    units: int
    bytes: int
    oldest_s: float
    used_bytes: int | None
    limit_bytes: int | None


def runnable(tx: Transaction) -> dict[TaskKind, float]:
    """Return how long a job has waited in which nothing happened, though a worker may take a task of it.

    By the kind of task, the longest time in seconds; 0 where no job waits.
    """
    ages = {}
    for kind, policy in POLICIES.items():
        due = or_(TASK.c.not_before.is_(None), TASK.c.not_before <= tx.now)
        free = TASK.c.job_id == JOB.c.id, TASK.c.kind == kind, TASK.c.state == TaskState.PENDING, due
        oldest = select(func.min(JOB.c.updated_at)).where(JOB.c.state.in_(policy.job_states))
        oldest = oldest.where(exists().where(*free))
        since = tx.connection.scalar(oldest.where(AT_WORK) if policy.job_states <= AT_WORK_STATES else oldest)
        ages[kind] = 0.0 if since is None else max((tx.now - since).total_seconds(), 0.0)
    return ages


def leased(tx: Transaction) -> dict[TaskKind, float]:
    """Return the age of the oldest lease of each kind in seconds; 0 where there is none."""
    # Word for word as in the condition of the index.
    state = TASK.c.state == literal(TaskState.LEASED, TASK.c.state.type, literal_execute=True)
    query = select(TASK.c.kind, func.min(TASK.c.leased_at)).where(state).group_by(TASK.c.kind)
    since = {kind: at for kind, at in tx.connection.execute(query) if at is not None}
    return {
        kind: max((tx.now - since[kind]).total_seconds(), 0.0) if kind in since else 0.0 for kind in TaskKind
    }


def held(tx: Transaction) -> list[Held]:
    """Return what each host holds, the data folder's first."""
    leaving = select(JOB.c.id).where(JOB.c.publish_subject != JOB.c.id, JOB.c.units_stored < JOB.c.units_done)
    sums = func.count(), func.sum(UNIT_COMMIT.c.num_bytes), func.min(UNIT_COMMIT.c.committed_at)
    waiting = select(UNIT_COMMIT.c.host, *sums).where(
        ~UNIT_COMMIT.c.is_stored, UNIT_COMMIT.c.job_id.in_(leaving)
    )
    of_host = {host: made for host, *made in tx.connection.execute(waiting.group_by(UNIT_COMMIT.c.host))}
    there = select(WORKER.c.host, WORKER.c.status).where(WORKER.c.alive_until > tx.clock)
    limits: dict[int, int | None] = {}
    status: WorkerStatus
    for host, status in tx.connection.execute(there):
        limits[host] = min(filter(None, (limits.get(host), status.scratch_bytes)), default=None)
    known = select(HOST.c.number, HOST.c.id, HOST.c.name).where(HOST.c.number.in_({HOME, *limits, *of_host}))
    found = []
    for number, host_id, name in tx.connection.execute(known.order_by(HOST.c.number)):
        units, size, since = of_host.get(number, (0, 0, tx.now))
        age_s = max((tx.now - since).total_seconds(), 0.0)
        limit = limits.get(number)
        used = None if limit is None else storing.unstored(tx, number)[0]
        found.append(Held(host_id or "", name, units, int(size), age_s, used, limit))
    return found
