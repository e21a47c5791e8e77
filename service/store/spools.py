"""Ownership of posted samples: a schedule's, by its number, or those of the jobs that took them."""

from dataclasses import dataclass

from sqlalchemy import and_, exists, func, or_, select

from schemas.job import STOPPED_JOB_STATES, JobState
from schemas.request import ExtractRequest
from schemas.schedule import RunOutcome
from schemas.source import Source, SourceKind
from service.errors import NotFound
from service.store import tasks, units
from service.store.database import Transaction
from service.store.schedule_tables import DELETED_SCHEDULE, RUN, SCHEDULE, SCHEDULE_REQUEST
from service.store.tables import JOB, SHARD
from service.store.values import PlanLease


def deleted(tx: Transaction) -> set[int]:
    """Return the numbers of the schedules that were deleted."""
    return set(tx.connection.scalars(select(DELETED_SCHEDULE.c.number)))


def of_owner(tx: Transaction, owner: str) -> list[int]:
    """Return the numbers of an owner's schedules."""
    return list(tx.connection.scalars(select(SCHEDULE.c.number).where(SCHEDULE.c.owner == owner)))


def takers(tx: Transaction, owner: str) -> list[str]:
    """Return an owner's jobs that may hold samples that they took: once one is complete, they are removed."""
    posted = JOB.c.source_kind == SourceKind.POSTED, JOB.c.state != JobState.COMPLETED
    return list(tx.connection.scalars(select(JOB.c.id).where(JOB.c.owner == owner, *posted)))


def source_of(tx: Transaction, number: int) -> tuple[str, str | None, Source]:
    """Return a schedule's name, its owner, and what its jobs read. Raises NotFound if it was deleted."""
    columns = SCHEDULE.c.name, SCHEDULE.c.owner, SCHEDULE_REQUEST.c.body
    query = select(*columns).join(SCHEDULE).where(SCHEDULE.c.number == number)
    row = tx.connection.execute(query).one_or_none()
    if row is None:
        raise NotFound("the schedule was deleted", field="name", cure="GET /schedules lists the schedules")
    return row.name, row.owner, ExtractRequest.model_validate_json(row.body).source


@dataclass(frozen=True, slots=True)
class Posted:
    """Which of the posted samples that an ended job took are in a dataset: all of them if `is_whole`.

    If it only `is_completed`, those that it did not leave to the next run. Samples that were not finite are
    in none: that run tries them again, and knows the others of their files.
    """

    spool: int
    is_completed: bool
    is_whole: bool


def left_by(tx: Transaction, job_id: str) -> Posted | None:
    """Return what happened to a job's posted samples, or None if no schedule owns them any more."""
    state = func.coalesce(RUN.c.job_state, JOB.c.state).label("state")
    of_job = select(JOB.c.spool, JOB.c.schedule, RUN.c.outcome, state).outerjoin(
        RUN, RUN.c.job_id == JOB.c.id
    )
    row = tx.connection.execute(of_job.where(JOB.c.id == job_id, JOB.c.spool.is_not(None))).one_or_none()
    if row is None:
        return None
    is_completed = row.state is JobState.COMPLETED
    is_whole = is_completed and row.outcome is not RunOutcome.CUT_SHORT
    if is_whole and row.schedule is not None:  # otherwise the next run would know none of its samples
        is_whole = not units.left_not_finite(tx, job_id)
    return Posted(row.spool, is_completed, is_whole)


def leaving(tx: Transaction, lease: PlanLease) -> dict[str, bool]:
    """Return the earlier runs that leave posted samples to a job, and whether each has written any.

    These are the runs that were cut short, or stopped before they had written anything; none of them
    continues. Raises LeaseLost.
    """
    tasks.held(tx, lease)
    has_written = exists().where(SHARD.c.job_id == JOB.c.id).label("has_written")
    stopped = and_(JOB.c.schedule == lease.spool, JOB.c.state.in_(STOPPED_JOB_STATES), ~has_written)
    number = select(JOB.c.number).where(JOB.c.id == lease.job_id).scalar_subquery()
    before = and_(RUN.c.schedule == lease.spool, JOB.c.number < number)
    runs = select(JOB.c.id, has_written).join(RUN, RUN.c.job_id == JOB.c.id).where(before)
    left = runs.where(or_(RUN.c.outcome == RunOutcome.CUT_SHORT, stopped)).order_by(JOB.c.number)
    return {row.id: bool(row.has_written) for row in tx.connection.execute(left)}
