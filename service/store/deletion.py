"""Deletion: a task removes what is left of a job that has ended, in steps that hold up no other writer."""

from datetime import timedelta
from typing import Any

from sqlalchemy import Select, Table, and_, delete, exists, or_, select, tuple_, update

from schemas.job import ENDED_JOB_STATES, JobState
from service.errors import NotFound
from service.store import tasks, totals
from service.store.database import Store, Transaction
from service.store.schedule_tables import CAPTURED_SAMPLES, RUN
from service.store.tables import (
    CONSUMER,
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
from service.store.transitions import LockedJob, add_task, lock_job, move_job
from service.store.values import DeletionLease, Lease, TaskKind

TOMBSTONE = timedelta(days=30)
"""How long an idempotency key names a job that was deleted, so that it names no other; then it is free."""

MAX_ROWS = 2000
"""Rows that one transaction deletes: others write within some tens of milliseconds."""
MAX_BLOBS, BLOBS = 50, (UNIT_PLAN, TOKEN_COUNTS)
"""Of them, those of some 10 to 200 kB each."""


def begin(tx: Transaction, job_id: str, *, with_dataset: bool) -> None:
    """Let nobody resume a job that has ended, nor name it by its key, and have it deleted.

    With its dataset here, if asked for: once that was asked for it stays so. Raises NotFound, IllegalMove.
    """
    locked = lock_job(tx, job_id)
    if locked.state is not JobState.DELETING:
        ended_at = select(JOB.c.updated_at).where(JOB.c.id == job_id).scalar_subquery()
        run = update(RUN).where(RUN.c.job_id == job_id)
        kept = {"job_state": locked.state, "job_ended_at": ended_at, "identity": locked.identity}
        tx.connection.execute(run.values(kept))
        if locked.state is not JobState.COMPLETED:
            # What it wrote is in no dataset: those samples come again.
            of_job = (CAPTURED_SAMPLES.c.schedule == locked.schedule) & (CAPTURED_SAMPLES.c.job_id == job_id)
            tx.connection.execute(delete(CAPTURED_SAMPLES).where(of_job))
        add_task(tx, move_job(tx, locked, JobState.DELETING), TaskKind.DELETE)
        submission = update(SUBMISSION).where(SUBMISSION.c.job_id == job_id)
        tx.connection.execute(submission.values(deleted_at=tx.now))
    if with_dataset:
        tx.connection.execute(update(JOB).where(JOB.c.id == job_id).values(deletes_dataset=True))


def lease(store: Store, owner: str, ttl_s: float) -> DeletionLease | None:
    """Lease the deletion of a job."""
    return tasks.lease(store, TaskKind.DELETE, _grant, owner, ttl_s)


def _grant(tx: Transaction, job: LockedJob, lease: Lease) -> DeletionLease:
    with_dataset = select(JOB.c.deletes_dataset).where(JOB.c.id == job.id)
    return DeletionLease(**lease.fields(), with_dataset=tx.connection.execute(with_dataset).scalar_one())


def forget(tx: Transaction, job_id: str) -> bool:
    """Delete some records of a job whose deletion has begun; return whether others are left."""
    try:
        # First, as whoever takes its task does: neither then waits for the other with a lock in hand.
        job = lock_job(tx, job_id)
    except NotFound:
        return False  # another was faster
    room = MAX_ROWS
    for table in (EVENT, REJECT, SHARD, UNIT_COMMIT, UNIT_PLAN, TOKEN_COUNTS, UNIT, TASK):
        mine = select(*table.primary_key).where(table.c.job_id == job_id)
        if table is TASK:
            mine = mine.where(TASK.c.kind != TaskKind.DELETE)  # its lease goes on
        most = min(room, MAX_BLOBS) if table in BLOBS else room
        deleted = _delete(tx, table, mine.limit(most))
        if deleted == most:
            return True
        room -= deleted
    for table in (TASK, FINAL_NORM, REQUEST, CONSUMER):
        tx.connection.execute(delete(table).where(table.c.job_id == job_id))
    tx.connection.execute(delete(JOB).where(JOB.c.id == job_id))
    totals.keep(tx, job.progress.model_dump(exclude={"plan_done"}))
    tx.connection.execute(delete(PAUSE).where(PAUSE.c.until <= tx.now))
    tx.connection.execute(delete(SUBMISSION).where(SUBMISSION.c.deleted_at <= tx.now - TOMBSTONE))
    return False


def was_deleted(tx: Transaction, job_id: str) -> bool:
    """Say whether a job of this database was deleted, while its tombstone stands."""
    gone = SUBMISSION.c.job_id == job_id, SUBMISSION.c.deleted_at.is_not(None)
    is_there = exists().where(JOB.c.id == job_id)
    return bool(tx.connection.scalar(select(and_(exists().where(*gone), ~is_there))))


def spent(tx: Transaction) -> list[str]:
    """Return complete jobs that have token counts or plans left, which nobody reads again."""
    left = or_(*(exists().where(table.c.job_id == JOB.c.id) for table in BLOBS))
    query = select(JOB.c.id).where(JOB.c.state == JobState.COMPLETED, left)
    return list(tx.connection.scalars(query.order_by(JOB.c.number)))


def forget_spent(tx: Transaction, job_id: str) -> bool:
    """Delete some of these of a complete job; return whether others are left. Raises NotFound."""
    lock_job(tx, job_id)
    for table in BLOBS:
        mine = select(*table.primary_key).where(table.c.job_id == job_id)
        if _delete(tx, table, mine.limit(MAX_BLOBS)) == MAX_BLOBS:
            return True
    return False


def old(tx: Transaction, age_s: float) -> list[str]:
    """Return the jobs that ended `age_s` ago."""
    ended = ENDED_JOB_STATES - {JobState.DELETING}
    query = select(JOB.c.id).where(
        JOB.c.state.in_(ended), JOB.c.updated_at <= tx.now - timedelta(seconds=age_s)
    )
    return list(tx.connection.scalars(query.order_by(JOB.c.number)))


def _delete(tx: Transaction, table: Table, keys: Select[Any]) -> int:
    """Delete the rows with these primary keys; return how many there were."""
    return tx.connection.execute(delete(table).where(tuple_(*table.primary_key).in_(keys))).rowcount
