"""Selects the task that an owner leases next: the queries of `tasks`, built once."""

from dataclasses import dataclass
from datetime import datetime
from functools import cache
from typing import Any

from sqlalchemy import (
    Boolean,
    ColumnElement,
    Integer,
    Select,
    String,
    and_,
    bindparam,
    exists,
    false,
    func,
    literal,
    or_,
    select,
    union_all,
)
from sqlalchemy.orm import aliased

from schemas.job import JobState
from service.store.policies import POLICIES
from service.store.tables import AT_WORK, AT_WORK_STATES, JOB, OF_JOB, OPEN_WEBHOOK, SICKNESS, TASK
from service.store.transitions import TASK_COLUMNS
from service.store.values import HOME, TaskKind, TaskState


@dataclass(frozen=True, slots=True)
class Choice:
    """Which tasks an owner may take.

    `prefer_job` comes first among jobs of equal priority. With `outranking`, only jobs of higher priority
    than that job. With `spares_lone`, no task on which an engine died while it ran alone. With `unpushed`, no
    job that is pushed. With `is_full` (the disk), no unit of a job whose shards are removed once stored.
    `host` is the owner's.
    """

    prefer_job: str | None = None
    outranking: str | None = None
    spares_lone: bool = False
    unpushed: bool = False
    is_full: bool = False
    host: int = HOME


ANY = Choice()


@cache  # SQLAlchemy takes longer to build these than a database to run them; a store has one clock
def jobs_with_work(
    clock: ColumnElement[datetime], kind: TaskKind, spares_lone: bool, outranks: bool
) -> Select[Any]:
    """Select the id of the next job with a free task; binds `prefer_job`, and for units also `by_owner`.

    With `outranks`, its priority must be higher than that of the job bound as `outranking`.

    The first job, the first of an owner whose turn it is, and the preferred job are separate subqueries, so
    that each walks an index only up to the first job with a free task.
    """
    ways = _free(clock, kind, spares_lone)
    waiting = or_(*(exists().where(TASK.c.job_id == JOB.c.id, free) for free in ways))
    states = POLICIES[kind].job_states
    has_one = func.coalesce(JOB.c.owner, "").in_(_owners(clock, kind))
    late = has_one if POLICIES[kind].by_turns else false()
    columns = JOB.c.id, JOB.c.priority, JOB.c.number, late.label("late")
    query = select(*columns).where(waiting)
    if POLICIES[kind].one_an_owner:
        query = query.where(~has_one)
    if states <= AT_WORK_STATES:
        query = query.where(AT_WORK)
    if POLICIES[kind].few:
        # NOT IN keeps the planner off the index on the job's state, so that it uses that of the open tasks.
        query = query.where(JOB.c.state.not_in(frozenset(JobState) - states))
        query = query.where(JOB.c.id.in_(select(TASK.c.job_id).where(OPEN_WEBHOOK)))
    else:
        query = query.where(JOB.c.state.in_(states))
    if POLICIES[kind].one_a_subject:
        is_pushed = JOB.c.publish_subject != JOB.c.id
        query = query.where(~and_(bindparam("unpushed", type_=Boolean), is_pushed))
    if POLICIES[kind].of_units:
        at_home, is_full = bindparam("host", type_=Integer) == HOME, bindparam("is_full", type_=Boolean)
        query = query.where(or_(at_home, JOB.c.publish_subject != JOB.c.id))
        query = query.where(or_(and_(JOB.c.keeps_local, at_home), ~is_full))
        mine = SICKNESS.c.owner == bindparam("by_owner", type_=String), SICKNESS.c.until > clock
        query = query.where(~exists().where(*mine, OF_JOB))
    if outranks:
        other = aliased(JOB)
        of_other = select(other.c.priority).where(other.c.id == bindparam("outranking", type_=String))
        query = query.where(JOB.c.priority > of_other.scalar_subquery())
    first = query.order_by(JOB.c.priority.desc(), JOB.c.number).limit(1)
    preferred = query.where(JOB.c.id == bindparam("prefer_job", type_=String))
    ways_in = [first, preferred, *([first.where(~late)] if POLICIES[kind].by_turns else [])]
    either = union_all(*(select(way.subquery()) for way in ways_in)).subquery()
    is_other = either.c.id != bindparam("prefer_job", type_=String)
    order = either.c.priority.desc(), either.c.late, is_other, either.c.number
    return select(either.c.id).order_by(*order).limit(1)


def _owners(clock: ColumnElement[datetime], kind: TaskKind) -> Select[tuple[str]]:
    """Select the owners of jobs that have a leased task of the kind; the operator's name is empty."""
    job, task = aliased(JOB), aliased(TASK)
    # Must be written exactly as in the condition of the index.
    leased = task.c.state == literal(TaskState.LEASED, TASK.c.state.type, literal_execute=True)
    query = select(func.coalesce(job.c.owner, "")).join(task, task.c.job_id == job.c.id)
    return query.where(task.c.kind == kind, leased, task.c.lease_until > clock)


@cache
def lowest_free(clock: ColumnElement[datetime], kind: TaskKind, spares_lone: bool) -> Select[Any]:
    """Select the lowest free task of the job bound as `job_id`, for an owner on `host` if that matters.

    There is one subquery for each way of being free: both walk the index and skip tasks that are done.
    """
    of_job = select(*TASK_COLUMNS).where(TASK.c.job_id == bindparam("job_id", type_=String))
    lowest = of_job.order_by(TASK.c.item).limit(1)
    ways = _free(clock, kind, spares_lone)
    either = union_all(*(select(lowest.where(free).subquery()) for free in ways)).subquery()
    return select(either).order_by(either.c.item).limit(1)


def _free(
    clock: ColumnElement[datetime], kind: TaskKind, spares_lone: bool
) -> tuple[ColumnElement[bool], ColumnElement[bool]]:
    """Return the two conditions under which a task of a kind is free: it waits, or its lease has expired."""
    due = or_(TASK.c.not_before.is_(None), TASK.c.not_before <= clock)
    waits = and_(TASK.c.kind == kind, TASK.c.state == TaskState.PENDING, due)
    expired = and_(TASK.c.kind == kind, TASK.c.state == TaskState.LEASED, TASK.c.lease_until <= clock)
    if POLICIES[kind].of_hosts:
        mine = TASK.c.item == bindparam("host", type_=Integer)
        waits, expired = and_(waits, mine), and_(expired, mine)
    if spares_lone:
        waits, expired = (and_(free, TASK.c.lone_deaths.is_(None)) for free in (waits, expired))
    if not POLICIES[kind].one_a_subject:
        return waits, expired
    other = aliased(TASK)
    held = exists().where(
        other.c.kind == kind,
        other.c.subject == TASK.c.subject,
        other.c.state == TaskState.LEASED,
        other.c.lease_until > clock,
    )
    return and_(waits, ~held), and_(expired, ~held)
