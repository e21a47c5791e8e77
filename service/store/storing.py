"""Storing: pushes captured units to the job's repository while others are still being captured."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta

from sqlalchemy import ColumnElement, Select, and_, case, delete, func, literal, or_, select, update

from schemas.job import RESTING_JOB_STATES, JobState
from schemas.names import MAX_COMMIT_FILES
from service.store import tasks
from service.store.database import Store, Transaction
from service.store.migration import check_write
from service.store.stopping import UNLEASED
from service.store.tables import JOB, PAUSE, SHARD, TASK, UNIT_COMMIT, UNIT_PLAN
from service.store.task_choice import Choice
from service.store.transitions import LockedJob, add_task, count, record
from service.store.values import HOME, Lease, StoreLease, TaskKind, TaskState

FULL_FILES = MAX_COMMIT_FILES
"""How many files fill a commit: a unit has an index and one shard per rank."""
APART, LATEST = timedelta(seconds=30), timedelta(minutes=10)
"""The time between commits to a repository, and how long a unit waits for others: the Hub allows 128 commits
an hour.
"""


def add(tx: Transaction, job: LockedJob, host: int) -> None:
    """Schedule storing what a host captured of a locked job: soon if it fills a commit, otherwise later."""
    mine = _task(job, host)
    soon, late = tx.now + APART, tx.now + LATEST
    state = tx.connection.scalar(select(TASK.c.state).where(mine))
    if state is None:
        add_task(tx, job, TaskKind.STORE, host, not_before=late)
        return
    if state is TaskState.DONE:
        again = {"state": TaskState.PENDING, "attempts": 0, "deaths": 0, "not_before": late}
        tx.connection.execute(update(TASK).where(mine).values(again))
    if _is_full(tx, job.id, host):
        tx.connection.execute(update(TASK).where(mine, TASK.c.not_before > soon).values(not_before=soon))


def unstored(tx: Transaction, host: int) -> tuple[int, int, int]:
    """Return the bytes and the number of a host's captured units whose shards are removed once stored.

    The third value is how many of them belong to resting jobs, and so are not being stored.
    """
    waiting = ~UNIT_COMMIT.c.is_stored, UNIT_COMMIT.c.host == host, UNIT_COMMIT.c.job_id.in_(_leaving(host))
    rests = func.sum(case((JOB.c.state.in_(RESTING_JOB_STATES), 1), else_=0))
    sums = select(func.sum(UNIT_COMMIT.c.num_bytes), func.count(), rests)
    # A completed job is a dataset like any other, whether its consumers take the rest or not.
    is_open = JOB.c.state != JobState.COMPLETED
    query = sums.join(JOB, JOB.c.id == UNIT_COMMIT.c.job_id).where(*waiting, is_open)
    num_bytes, num_units, num_resting = (int(value or 0) for value in tx.connection.execute(query).one())
    return num_bytes, num_units, num_resting


def hasten(tx: Transaction, host: int) -> None:
    """Store such units now, even if they do not fill a commit; tasks that failed wait for `APART`."""
    check_write(tx)
    mine = TASK.c.kind == TaskKind.STORE, TASK.c.item == host, TASK.c.job_id.in_(_leaving(host))
    fresh = TASK.c.problem.is_(None)
    for which, when in ((fresh, tx.now), (~fresh, tx.now + APART)):
        late = select(TASK.c.job_id).where(*mine, which, TASK.c.not_before > when)
        # Never waits for a job's row while it holds another's: a host that is given up locks them in order.
        late = late.with_for_update(skip_locked=True)
        tx.connection.execute(update(TASK).where(*mine, TASK.c.job_id.in_(late)).values(not_before=when))


def _leaving(host: int) -> Select[tuple[str]]:
    """Select the jobs whose shards are removed from a host once they are stored."""
    return select(JOB.c.id).where(or_(literal(host != HOME), ~JOB.c.keeps_local))


def end_when_captured(tx: Transaction, job: LockedJob) -> None:
    """Add the publishing of a locked job once all units are done; it also stores what is in the data folder.

    What other hosts have must be stored first; that becomes due now.
    """
    if not job.progress.is_captured:
        return
    of_job = (TASK.c.job_id == job.id) & (TASK.c.kind == TaskKind.STORE)
    over = UNLEASED | {"state": TaskState.DONE, "problem": None}
    tx.connection.execute(update(TASK).where(of_job, TASK.c.item == HOME).values(over))
    held = UNIT_COMMIT.c.job_id == job.id, UNIT_COMMIT.c.host != HOME, ~UNIT_COMMIT.c.is_stored
    others = tx.connection.scalars(select(UNIT_COMMIT.c.host).where(*held).distinct()).all()
    for host in others:
        if tx.connection.scalar(select(TASK.c.item).where(_task(job, host))) is None:
            add_task(tx, job, TaskKind.STORE, host)
    waits = of_job, TASK.c.item.in_(others), TASK.c.state != TaskState.LEASED
    tx.connection.execute(update(TASK).where(*waits).values(state=TaskState.PENDING, not_before=None))
    if not others:
        # One that was there when units were lost with their host is done, and keeps its epoch.
        again = update(TASK).where(TASK.c.job_id == job.id, TASK.c.kind == TaskKind.PUBLISH)
        again = again.where(TASK.c.state == TaskState.DONE).values(state=TaskState.PENDING)
        if not tx.connection.execute(again).rowcount:
            add_task(tx, job, TaskKind.PUBLISH, subject=job.publish_subject)


def _task(job: LockedJob, host: int) -> ColumnElement[bool]:
    return and_(TASK.c.job_id == job.id, TASK.c.kind == TaskKind.STORE, TASK.c.item == host)


def lease(store: Store, owner: str, ttl_s: float, host: int = HOME) -> StoreLease | None:
    """Lease the storing of a job's units that a host has captured."""
    return tasks.lease(store, TaskKind.STORE, _grant, owner, ttl_s, Choice(host=host))


def _grant(tx: Transaction, job: LockedJob, lease: Lease) -> StoreLease:
    assert job.provenance is not None, "set by the first commit"  # noqa: S101
    return StoreLease(**lease.fields(), identity=job.known_identity, provenance=job.provenance)


def take_turn(tx: Transaction, lease: StoreLease) -> float:
    """Claim the next commit to the job's repository: return 0, or seconds to wait first. Raises LeaseLost."""
    job, _ = tasks.held(tx, lease)
    next_one = {"until": tx.now + APART}
    claim = tx.insert(PAUSE).values(subject=job.publish_subject, **next_one)
    free = PAUSE.c.until <= tx.now
    claim = claim.on_conflict_do_update(index_elements=["subject"], set_=next_one, where=free)
    if tx.connection.scalar(claim.returning(PAUSE.c.subject)) is not None:
        return 0.0
    until = select(PAUSE.c.until).where(PAUSE.c.subject == job.publish_subject)
    return float((tx.connection.scalars(until).one() - tx.now).total_seconds())


def stored(tx: Transaction, lease: StoreLease, units: Sequence[int]) -> None:
    """Record that the repository holds these units of a host; end the lease; others wait for the next commit.

    Raises LeaseLost.
    """
    job, task = tasks.held(tx, lease)
    host = lease.item
    mine = and_(UNIT_COMMIT.c.job_id == job.id, UNIT_COMMIT.c.host == host, UNIT_COMMIT.c.unit.in_(units))
    now_stored = update(UNIT_COMMIT).where(mine, ~UNIT_COMMIT.c.is_stored).values(is_stored=True)
    sizes = tx.connection.scalars(now_stored.returning(UNIT_COMMIT.c.num_bytes)).all()
    gone = 0 if job.keeps_local and host == HOME else sum(sizes)
    progress = count(job.progress, units_stored=len(sizes), bytes_gone=gone)
    plans = UNIT_PLAN.c.job_id == job.id, UNIT_PLAN.c.unit.in_(units)
    tx.connection.execute(delete(UNIT_PLAN).where(*plans))
    message = f"{progress.units_stored} of {progress.units_done} captured units are stored"
    job = record(tx, replace(job, progress=progress, problem=None), "progress", message)
    if tx.connection.scalar(_waiting(job.id, host).limit(1)) is None:
        end_when_captured(tx, tasks.done(tx, job, task))
    else:
        soon = _is_full(tx, job.id, host) or progress.is_captured
        tasks.put_off(tx, job, task, APART if soon else LATEST)


def _waiting(job_id: str, host: int) -> Select[tuple[int]]:
    """Select a host's units of a job that are captured but not stored."""
    mine = UNIT_COMMIT.c.job_id == job_id, UNIT_COMMIT.c.host == host, ~UNIT_COMMIT.c.is_stored
    return select(UNIT_COMMIT.c.unit).where(*mine)


def _is_full(tx: Transaction, job_id: str, host: int) -> bool:
    """Return whether a host's units of a job fill a commit, reading no more rows than needed."""
    some = _waiting(job_id, host).limit(FULL_FILES).subquery()
    shards = select(SHARD.c.unit).join(some, SHARD.c.unit == some.c.unit).where(SHARD.c.job_id == job_id)
    counts = (select(func.count()).select_from(rows) for rows in (some, shards.limit(FULL_FILES).subquery()))
    return sum(tx.connection.execute(query).scalar_one() for query in counts) >= FULL_FILES
