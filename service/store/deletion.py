"""Deletion: a task removes an ended job's records, in steps small enough not to block other writers."""

from datetime import timedelta
from typing import Any

from pydantic import ValidationError
from sqlalchemy import Select, Table, and_, delete, exists, or_, select, tuple_, update

from schemas.job import ENDED_JOB_STATES, JobState
from service.errors import NotFound
from service.store import consumers, keys, tasks, totals, workers
from service.store.database import Store, Transaction
from service.store.job_rows import DOCUMENTS
from service.store.schedule_tables import CAPTURED_SAMPLES, RUN
from service.store.tables import (
    EVENT,
    FINAL_NORM,
    JOB,
    PAUSE,
    REJECT,
    REQUEST,
    SHARD,
    SUBMISSION,
    TASK,
    TOKEN_COUNTS,
    UNIT,
    UNIT_COMMIT,
    UNIT_PLAN,
)
from service.store.transitions import add_task, lock_job, move_job
from service.store.values import Lease, TaskKind

TOMBSTONE = timedelta(days=30)
"""How long the idempotency key of a deleted job cannot be reused."""

MAX_ROWS = 2000
"""Maximum rows deleted in one transaction, so that others can write within some tens of milliseconds."""
MAX_BLOBS, BLOBS = 50, (UNIT_PLAN, TOKEN_COUNTS)
"""The maximum for tables with rows of some 10 to 200 kB."""


def begin(tx: Transaction, job_id: str, *, with_dataset: bool) -> None:
    """Start the deletion of an ended job: it can no longer be resumed or named by its key.

    Its dataset in the data folder is deleted, too, if any call asks for that. What cannot be read of its row
    is gone at once. Raises NotFound, IllegalMove.
    """
    try:
        locked = lock_job(tx, job_id)
    except ValidationError:
        _drop_unread(tx, job_id)
        locked = lock_job(tx, job_id)
    if locked.state is not JobState.DELETING:
        ended_at = select(JOB.c.updated_at).where(JOB.c.id == job_id).scalar_subquery()
        run = update(RUN).where(RUN.c.job_id == job_id)
        kept = {"job_state": locked.state, "job_ended_at": ended_at, "identity": locked.identity}
        tx.connection.execute(run.values(kept))
        if locked.state is not JobState.COMPLETED:
            # What it wrote is in no dataset, so those samples are captured again.
            of_job = (CAPTURED_SAMPLES.c.schedule == locked.schedule) & (CAPTURED_SAMPLES.c.job_id == job_id)
            tx.connection.execute(delete(CAPTURED_SAMPLES).where(of_job))
        add_task(tx, move_job(tx, locked, JobState.DELETING), TaskKind.DELETE)
        submission = update(SUBMISSION).where(SUBMISSION.c.job_id == job_id)
        tx.connection.execute(submission.values(deleted_at=tx.now))
    if with_dataset:
        tx.connection.execute(update(JOB).where(JOB.c.id == job_id).values(deletes_dataset=True))


def _drop_unread(tx: Transaction, job_id: str) -> None:
    """Delete the documents in a job's row that cannot be read; otherwise nothing could move the job."""
    row = JOB.c.id == job_id
    for name in DOCUMENTS:
        try:
            tx.connection.execute(select(JOB.c[name]).where(row)).all()
        except ValidationError:
            tx.connection.execute(update(JOB).where(row).values({name: None}))


def lease(store: Store, owner: str, ttl_s: float) -> Lease | None:
    """Lease the deletion of a job."""
    return tasks.lease(store, TaskKind.DELETE, lambda tx, job, lease: lease, owner, ttl_s)


def takes_dataset(tx: Transaction, job_id: str) -> bool:
    """Return whether the dataset of a job in the data folder goes with the job; False if the job is gone."""
    return bool(tx.connection.scalar(select(JOB.c.deletes_dataset).where(JOB.c.id == job_id)))


def forget(tx: Transaction, job_id: str, *, keeps_dataset: bool = False) -> bool:
    """Delete some records of a job whose deletion has begun; return whether any are left.

    With `keeps_dataset` the caller has left the dataset; all records stay if it is to go by now, since nobody
    would know of it any more.
    """
    try:
        # Lock it first, as whoever leases its task does, so that they cannot deadlock.
        job = lock_job(tx, job_id)
    except NotFound:
        return False  # another process was faster
    if keeps_dataset and takes_dataset(tx, job_id):
        return True
    room = MAX_ROWS
    for table in (EVENT, REJECT, SHARD, UNIT_COMMIT, UNIT_PLAN, TOKEN_COUNTS, UNIT, TASK):
        mine = select(*table.primary_key).where(table.c.job_id == job_id)
        if table is TASK:
            mine = mine.where(TASK.c.kind != TaskKind.DELETE)  # its lease is still needed
        most = min(room, MAX_BLOBS) if table in BLOBS else room
        deleted = _delete(tx, table, mine.limit(most))
        if deleted == most:
            return True
        room -= deleted
    for table in (TASK, FINAL_NORM, REQUEST):
        tx.connection.execute(delete(table).where(table.c.job_id == job_id))
    consumers.forget_all(tx, job_id)
    tx.connection.execute(delete(JOB).where(JOB.c.id == job_id))
    totals.keep(tx, job.progress.model_dump(exclude={"plan_done"}))
    tx.connection.execute(delete(PAUSE).where(PAUSE.c.until <= tx.now))
    tx.connection.execute(delete(SUBMISSION).where(SUBMISSION.c.deleted_at <= tx.now - TOMBSTONE))
    workers.forget_refusals(tx, job_id)  # locks the workers after the totals, as a resume does
    return False


def was_deleted(tx: Transaction, job_id: str) -> bool:
    """Return whether a job of this database was deleted; known while its tombstone exists."""
    gone = SUBMISSION.c.job_id == job_id, SUBMISSION.c.deleted_at.is_not(None)
    is_there = exists().where(JOB.c.id == job_id)
    return bool(tx.connection.scalar(select(and_(exists().where(*gone), ~is_there))))


def spent(tx: Transaction) -> list[str]:
    """Return completed jobs that still have token counts or plans, which nobody will read again."""
    left = or_(*(exists().where(table.c.job_id == JOB.c.id) for table in BLOBS))
    query = select(JOB.c.id).where(JOB.c.state == JobState.COMPLETED, left)
    return list(tx.connection.scalars(query.order_by(JOB.c.number)))


def forget_spent(tx: Transaction, job_id: str) -> bool:
    """Delete some of those of a completed job; return whether any are left. Raises NotFound."""
    lock_job(tx, job_id)
    for table in BLOBS:
        mine = select(*table.primary_key).where(table.c.job_id == job_id)
        if _delete(tx, table, mine.limit(MAX_BLOBS)) == MAX_BLOBS:
            return True
    return False


def counted(tx: Transaction) -> set[str]:
    """Return the jobs whose shards here count for the `max_bytes` of their owner."""
    of_limited = JOB.c.owner.in_(keys.limited_owners(tx)), JOB.c.bytes_written > JOB.c.bytes_gone
    return set(tx.connection.scalars(select(JOB.c.id).where(*of_limited)))


def old(tx: Transaction, age_s: float) -> list[str]:
    """Return the jobs that ended at least `age_s` ago."""
    ended = ENDED_JOB_STATES - {JobState.DELETING}
    query = select(JOB.c.id).where(
        JOB.c.state.in_(ended), JOB.c.updated_at <= tx.now - timedelta(seconds=age_s)
    )
    return list(tx.connection.scalars(query.order_by(JOB.c.number)))


def _delete(tx: Transaction, table: Table, keys: Select[Any]) -> int:
    """Delete the rows with these primary keys; return their number."""
    return tx.connection.execute(delete(table).where(tuple_(*table.primary_key).in_(keys))).rowcount
