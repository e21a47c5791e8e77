"""Storing: units that are captured go to the job's repository while others are captured."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta

from sqlalchemy import func, select, update

from schemas.names import MAX_COMMIT_FILES
from service.store import tasks
from service.store.database import Store, Transaction
from service.store.migration import check_write
from service.store.tables import JOB, SHARD, TASK, UNIT_COMMIT
from service.store.transitions import LockedJob, count, record
from service.store.values import Lease, StoreLease, TaskKind, TaskState

FULL_FILES = MAX_COMMIT_FILES
"""Files that fill a commit: a unit has an index and a shard a rank."""
APART, LATEST = timedelta(seconds=30), timedelta(minutes=10)
"""Between two commits of a repository, and how long a unit waits for others: the Hub takes 128 an hour."""


def add(tx: Transaction, job: LockedJob) -> None:
    """Have a locked job's captured units stored: soon if they fill a commit, or else in a while."""
    if job.publish_subject == job.id:
        return
    of_job = (TASK.c.job_id == job.id) & (TASK.c.kind == TaskKind.STORE)
    if tx.connection.scalar(select(TASK.c.item).where(of_job)) is None:
        tasks.add(tx, job, TaskKind.STORE, subject=job.publish_subject, not_before=tx.now + LATEST)
    elif _is_full(tx, job.id):
        soon = TASK.c.not_before > tx.now + APART
        tx.connection.execute(update(TASK).where(of_job, soon).values(not_before=tx.now + APART))


def unstored(tx: Transaction) -> tuple[int, int]:
    """Return the bytes, and the number, of captured units whose shards go when they are stored."""
    leaving = select(JOB.c.id).where(~JOB.c.keeps_local)
    waiting = ~UNIT_COMMIT.c.is_stored, UNIT_COMMIT.c.job_id.in_(leaving)
    query = select(func.coalesce(func.sum(UNIT_COMMIT.c.num_bytes), 0), func.count()).where(*waiting)
    num_bytes, num_units = tx.connection.execute(query).one()
    return int(num_bytes), num_units


def hasten(tx: Transaction) -> None:
    """Have such units stored soon, though they fill no commit yet."""
    check_write(tx)
    leaving = select(JOB.c.id).where(~JOB.c.keeps_local)
    soon = tx.now + APART
    late = (TASK.c.kind == TaskKind.STORE) & (TASK.c.not_before > soon) & TASK.c.job_id.in_(leaving)
    tx.connection.execute(update(TASK).where(late).values(not_before=soon))


def end(tx: Transaction, job: LockedJob) -> None:
    """Leave what is not stored yet of a locked job to its publication."""
    of_job = (TASK.c.job_id == job.id) & (TASK.c.kind == TaskKind.STORE)
    over = {"state": TaskState.DONE, "owner": None, "lease_until": None, "problem": None}
    tx.connection.execute(update(TASK).where(of_job).values(over))


def lease(store: Store, owner: str, ttl_s: float) -> StoreLease | None:
    """Lease the storing of a job that has captured units for a commit."""
    return tasks.lease(store, TaskKind.STORE, _grant, owner, ttl_s)


def _grant(tx: Transaction, job: LockedJob, lease: Lease) -> StoreLease:
    assert job.provenance is not None, "set by the first commit"  # noqa: S101
    return StoreLease(**lease.fields(), identity=job.known_identity, provenance=job.provenance)


def stored(tx: Transaction, lease: StoreLease, units: Sequence[int]) -> None:
    """Note that the repository holds these units, and end the lease: others wait for their commit.

    Raises LeaseLost.
    """
    job, task = tasks.held(tx, lease)
    waiting = (UNIT_COMMIT.c.job_id == job.id) & ~UNIT_COMMIT.c.is_stored
    now_stored = update(UNIT_COMMIT).where(waiting, UNIT_COMMIT.c.unit.in_(units)).values(is_stored=True)
    progress = count(job.progress, units_stored=tx.connection.execute(now_stored).rowcount)
    message = f"{progress.units_stored} of {progress.units_done} captured units are stored"
    job = record(tx, replace(job, progress=progress, problem=None), "progress", message)
    tasks.put_off(tx, job, task, APART if _is_full(tx, job.id) else LATEST)
    tasks.pause(tx, job.publish_subject, APART)


def _is_full(tx: Transaction, job_id: str) -> bool:
    """Say whether a job's captured units fill a commit; no more rows are read than that takes."""
    waiting = select(UNIT_COMMIT.c.unit).where(UNIT_COMMIT.c.job_id == job_id, ~UNIT_COMMIT.c.is_stored)
    some = waiting.limit(FULL_FILES).subquery()
    shards = select(SHARD.c.unit).join(some, SHARD.c.unit == some.c.unit).where(SHARD.c.job_id == job_id)
    counts = (select(func.count()).select_from(rows) for rows in (some, shards.limit(FULL_FILES).subquery()))
    return sum(tx.connection.execute(query).scalar_one() for query in counts) >= FULL_FILES
