"""Tasks: what there is to do for a job, each leased to one owner at a time.

A lease that ran out is good until another owner takes the task: the epoch fences its holder, never the time.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timedelta
from functools import cache
from typing import Any, TypeVar

from sqlalchemy import (
    Boolean,
    ColumnElement,
    Select,
    String,
    and_,
    bindparam,
    exists,
    false,
    func,
    insert,
    literal,
    or_,
    select,
    union_all,
    update,
)
from sqlalchemy.orm import aliased

from schemas.job import JobState, Problem
from service.errors import STORE_AWAY, LeaseLost, NotFound, Outcome, QuarryError, internal_error
from service.store.database import Store, Transaction
from service.store.migration import check_write
from service.store.policies import POLICIES, task_name
from service.store.stopping import stop, void
from service.store.tables import AT_WORK, AT_WORK_STATES, JOB, SICKNESS, TASK
from service.store.transitions import (
    TASK_COLUMNS,
    LockedJob,
    LockedTask,
    lock_job,
    move_job,
    move_task,
    record,
)
from service.store.values import Lease, TaskKind, TaskState

logger = logging.getLogger(__name__)

AnyLease = TypeVar("AnyLease", bound=Lease)


@dataclass(frozen=True, slots=True)
class Choice:
    """Which tasks an owner takes.

    Of `prefer_job`, where no job has a higher priority; only of jobs that outrank `outranking`, a job; none
    on which an engine died alone, if it `spares_lone` ones; none of a job that is pushed, if `unpushed`.
    """

    prefer_job: str | None = None
    outranking: str | None = None
    spares_lone: bool = False
    unpushed: bool = False


ANY = Choice()


_MINE = and_(
    TASK.c.job_id == bindparam("of_job"),
    TASK.c.kind == bindparam("of_kind"),
    TASK.c.item == bindparam("of_item"),
    TASK.c.epoch == bindparam("of_epoch"),
    TASK.c.owner == bindparam("of_owner"),
    TASK.c.state == TaskState.LEASED,
)
"""What fences every write of an attempt; stopping a job voids its leases, too."""
_HELD = select(*TASK_COLUMNS).where(_MINE).with_for_update()
_EXTENDED = update(TASK).where(_MINE).values(lease_until=bindparam("until"))


def _attempt(lease: Lease) -> dict[str, object]:
    """Return the values that `_MINE` is bound to."""
    return {
        "of_job": lease.job_id,
        "of_kind": lease.kind,
        "of_item": lease.item,
        "of_epoch": lease.epoch,
        "of_owner": lease.owner,
    }


def add(
    tx: Transaction,
    job: LockedJob,
    kind: TaskKind,
    item: int = 0,
    *,
    subject: str | None = None,
    not_before: datetime | None = None,
) -> None:
    """Add a task that waits; it must not be there."""
    new = insert(TASK).values(
        job_id=job.id,
        kind=kind,
        item=item,
        subject=subject or f"{job.id}/{item}",
        state=TaskState.PENDING,
        epoch=0,
        attempts=0,
        deaths=0,
        not_before=not_before,
    )
    tx.connection.execute(new)


def lease(
    store: Store,
    kind: TaskKind,
    grant: Callable[[Transaction, LockedJob, Lease], AnyLease],
    owner: str,
    ttl_s: float,
    choice: Choice = ANY,
) -> AnyLease | None:
    """Try job after job, each in a transaction of its own, until one has a free task; `grant` completes it.

    A job is blocked on the way where too many owners died without a word over the task to be leased.
    """
    while (job_id := store.read(_next_job, kind, owner, choice)) is not None:
        try:
            with store.writing() as tx:
                taken = _take(tx, kind, job_id, owner, ttl_s, choice)
                if taken is not None:
                    return grant(tx, *taken)
        except STORE_AWAY:
            raise
        except Exception as error:
            # Supervisor: one job's bug must not keep the others from being leased.
            logger.exception("the %s of job %s cannot be leased", kind, job_id)
            store.write(_block, job_id, internal_error(error).problem())
    return None


def _block(tx: Transaction, job_id: str, problem: Problem) -> None:
    stop(tx, lock_job(tx, job_id), JobState.BLOCKED, problem)


def _next_job(tx: Transaction, kind: TaskKind, owner: str, choice: Choice = ANY) -> str | None:
    """Return the next job: one of the highest priority, there the preferred one, or else the oldest."""
    query = _jobs_with_work(tx.clock, kind, choice.spares_lone, choice.outranking is not None)
    job_id: str | None = tx.connection.scalar(query, asdict(choice) | {"by_owner": owner})
    return job_id


def _take(
    tx: Transaction, kind: TaskKind, job_id: str, owner: str, ttl_s: float, choice: Choice = ANY
) -> tuple[LockedJob, Lease] | None:
    """Lease the lowest free task of a kind; none if others were faster or the job was stopped.

    A lease that ran out was neither kept nor given back: its owner died without a word. That counts as a
    death and not as an attempt. With the last death that it may cost, a task blocks its job.
    """
    policy = POLICIES[kind]
    try:
        job = lock_job(tx, job_id)
    except NotFound:
        return None  # it was deleted meanwhile
    if job.state not in policy.job_states:
        return None
    if policy.one_a_subject:
        _lock_subject(tx, kind, job.publish_subject)
    query = _lowest_free(tx.clock, kind, choice.spares_lone)
    row = tx.connection.execute(query, {"job_id": job_id}).mappings().one_or_none()
    if row is None:
        return None
    before = LockedTask(**row)
    waiting = _after_death(before) if before.state is TaskState.LEASED else before
    if waiting.deaths >= policy.max_deaths:
        detail = f"{waiting.deaths} {policy.blame.format(item=before.item)}"
        problem = QuarryError(detail, cure=policy.cure).problem()
        if before.state is TaskState.LEASED:  # else the last death was counted by the subject's next owner
            job = move_task(tx, job, before, replace(waiting, problem=problem), problem)
        stop(tx, job, JobState.BLOCKED, problem)
        return None
    if policy.one_a_subject:
        _end_others(tx, before)
    if job.state is JobState.QUEUED:
        job = move_job(tx, job, JobState.RUNNING)
    after = replace(
        waiting,
        state=TaskState.LEASED,
        epoch=waiting.epoch + 1,
        attempts=waiting.attempts + 1,
        owner=owner,
        lease_until=tx.now + timedelta(seconds=ttl_s),
        not_before=None,
    )
    job = move_task(tx, job, before, after)
    return job, Lease(
        kind=kind,
        job_id=job_id,
        item=after.item,
        epoch=after.epoch,
        attempts=after.attempts,
        owner=owner,
        ttl_s=ttl_s,
        model=job.model,
    )


def held(tx: Transaction, lease: Lease) -> tuple[LockedJob, LockedTask]:
    """Lock the job of a task that is still leased to this attempt.

    Raises LeaseLost, also where the job was deleted.
    """
    what = f"epoch {lease.epoch} of the {task_name(lease.kind, lease.item)} of job {lease.job_id}"
    lost = LeaseLost(f"{lease.owner} no longer holds {what}")
    try:
        job = lock_job(tx, lease.job_id)
    except NotFound as error:
        raise lost from error
    row = tx.connection.execute(_HELD, _attempt(lease)).mappings().one_or_none()
    if row is None:
        raise lost
    return job, LockedTask(**row)


def extend(tx: Transaction, leases: Sequence[AnyLease], ttl_s: float) -> list[AnyLease]:
    """Let leases run for `ttl_s` from now; return those that are lost."""
    check_write(tx)
    until = tx.now + timedelta(seconds=ttl_s)
    lost = []
    for lease in sorted(leases, key=lambda lease: (lease.job_id, lease.kind, lease.item)):
        if tx.connection.execute(_EXTENDED, _attempt(lease) | {"until": until}).rowcount == 0:
            lost.append(lease)
    return lost


def done(tx: Transaction, job: LockedJob, task: LockedTask, **deltas: int) -> LockedJob:
    """End a task that was held; `deltas` change the job's counters."""
    after = replace(task, state=TaskState.DONE, owner=None, lease_until=None, problem=None)
    return move_task(tx, job, task, after, None, **deltas)


def forgive(tx: Transaction, task: LockedTask) -> None:
    """Forget the earlier attempts and deaths of a task that was held, since it gets on now."""
    if task.attempts > 1 or task.deaths:
        same = and_(TASK.c.job_id == task.job_id, TASK.c.kind == task.kind, TASK.c.item == task.item)
        tx.connection.execute(update(TASK).where(same).values(attempts=1, deaths=0))


def release(tx: Transaction, lease: Lease) -> None:
    """Give a task back as if this attempt had not been. Raises LeaseLost."""
    job, task = held(tx, lease)
    move_task(tx, job, task, void(task))


def give_way(tx: Transaction, lease: Lease, wait: timedelta) -> None:
    """Let a task wait, and then begin its first attempt. Raises LeaseLost."""
    job, task = held(tx, lease)
    fresh = replace(void(task), attempts=0, deaths=0, problem=None)
    move_task(tx, job, task, replace(fresh, not_before=tx.now + wait))


def release_owner(tx: Transaction, owner: str) -> None:
    """Give back all tasks of an owner that has ended, so that nobody waits: neither failures nor deaths."""
    check_write(tx)
    mine = update(TASK).where(TASK.c.owner == owner, TASK.c.state == TaskState.LEASED)
    tx.connection.execute(
        mine.values(state=TaskState.PENDING, owner=None, lease_until=None, attempts=TASK.c.attempts - 1)
    )


def fail(tx: Transaction, lease: Lease, problem: Problem, outcome: Outcome, max_attempts: int) -> None:
    """End an attempt with a problem. Raises LeaseLost.

    RETRY lets the task wait again until it has had `max_attempts`; then the job ends as the kind's policy
    says. FAIL fails the job at once. BLOCK blocks it. Neither BLOCK nor VOID counts the attempt, and every
    outcome is VOID where that is the policy, or all but FAIL where it is done ahead. A job that waits for
    this task alone says why; the same problem again is no news.
    """
    policy = POLICIES[lease.kind]
    if policy.exhausted is Outcome.VOID or (policy.ahead and outcome is not Outcome.FAIL):
        outcome = Outcome.VOID
    job, task = held(tx, lease)
    waiting = replace(void(task), problem=problem)
    if outcome is Outcome.RETRY:
        waiting = replace(waiting, attempts=task.attempts)
        if task.attempts >= max_attempts:
            outcome = policy.exhausted
    if outcome is Outcome.FAIL:
        failed = replace(waiting, state=TaskState.FAILED, attempts=task.attempts)
        job = move_task(tx, job, task, failed, problem, units_failed=int(policy.of_units))
        stop(tx, job, JobState.FAILED, problem)
    elif outcome is Outcome.BLOCK:
        stop(tx, move_task(tx, job, task, waiting, problem), JobState.BLOCKED, problem)
    else:
        delay_s = min(policy.delay * 2 ** max(waiting.attempts - 1, 0), 1.0) * lease.ttl_s
        if policy.alone and problem != job.problem:
            message = f"{lease.kind} is tried again"
            job = record(tx, replace(job, problem=problem), "progress", message, problem)
        after = replace(waiting, not_before=tx.now + timedelta(seconds=delay_s))
        move_task(tx, job, task, after, None if policy.alone else problem)


def _after_death(task: LockedTask) -> LockedTask:
    """Return a task whose lease ran out as it waits for its next attempt."""
    return replace(void(task), deaths=task.deaths + 1)


def _lock_subject(tx: Transaction, kind: TaskKind, subject: str) -> None:
    """Let no other transaction lease a task of the subject before this one ends."""
    same = and_(TASK.c.kind == kind, TASK.c.subject == subject)
    tx.connection.execute(select(TASK.c.job_id).where(same).order_by(TASK.c.job_id).with_for_update())


def _end_others(tx: Transaction, task: LockedTask) -> None:
    """End the lease that ran out on a task of another job with the same subject, if there is one."""
    other = and_(TASK.c.kind == task.kind, TASK.c.subject == task.subject, TASK.c.job_id != task.job_id)
    waiting = {
        "state": TaskState.PENDING,
        "owner": None,
        "lease_until": None,
        "attempts": TASK.c.attempts - 1,
        "deaths": TASK.c.deaths + 1,
    }
    tx.connection.execute(update(TASK).where(other, TASK.c.state == TaskState.LEASED).values(waiting))


@cache  # SQLAlchemy takes longer to build these than a database to run them; a store has one clock
def _jobs_with_work(
    clock: ColumnElement[datetime], kind: TaskKind, spares_lone: bool, outranks: bool
) -> Select[Any]:
    """Select the id of the next job with a free task; `prefer_job` is bound, and for units `by_owner`.

    If it `outranks`, its priority is higher than that of the job that is bound as `outranking`.

    The first of all, that of an owner whose turn it is, and the preferred one are selected apart, so that the
    jobs are walked by an index until the first that has one.
    """
    ways = _free(clock, kind, spares_lone)
    waiting = or_(*(exists().where(TASK.c.job_id == JOB.c.id, free) for free in ways))
    states = POLICIES[kind].job_states
    late = func.coalesce(JOB.c.owner, "").in_(_owners(clock, kind)) if POLICIES[kind].by_turns else false()
    columns = JOB.c.id, JOB.c.priority, JOB.c.number, late.label("late")
    query = select(*columns).where(JOB.c.state.in_(states), waiting)
    if states <= AT_WORK_STATES:
        query = query.where(AT_WORK)
    if POLICIES[kind].one_a_subject:
        is_pushed = JOB.c.publish_subject != JOB.c.id
        query = query.where(~and_(bindparam("unpushed", type_=Boolean), is_pushed))
    if POLICIES[kind].of_units:
        mine = SICKNESS.c.owner == bindparam("by_owner", type_=String), SICKNESS.c.until > clock
        query = query.where(~exists().where(*mine, SICKNESS.c.model_sha256 == JOB.c.model_sha256))
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
    """Select the owners of jobs that have a task of the kind leased; the operator's name is empty."""
    job, task = aliased(JOB), aliased(TASK)
    # Word for word as in the condition of the index.
    leased = task.c.state == literal(TaskState.LEASED, TASK.c.state.type, literal_execute=True)
    query = select(func.coalesce(job.c.owner, "")).join(task, task.c.job_id == job.c.id)
    return query.where(task.c.kind == kind, leased, task.c.lease_until > clock)


@cache
def _lowest_free(clock: ColumnElement[datetime], kind: TaskKind, spares_lone: bool) -> Select[Any]:
    """Select the lowest free task of the job that is bound as `job_id`.

    A select for each way to be free: both walk the index, and neither reads the tasks that are done.
    """
    of_job = select(*TASK_COLUMNS).where(TASK.c.job_id == bindparam("job_id", type_=String))
    lowest = of_job.order_by(TASK.c.item).limit(1)
    ways = _free(clock, kind, spares_lone)
    either = union_all(*(select(lowest.where(free).subquery()) for free in ways)).subquery()
    return select(either).order_by(either.c.item).limit(1)


def _free(
    clock: ColumnElement[datetime], kind: TaskKind, spares_lone: bool
) -> tuple[ColumnElement[bool], ColumnElement[bool]]:
    """Return the two ways in which a task of a kind is free: it waits, or its lease ran out."""
    due = or_(TASK.c.not_before.is_(None), TASK.c.not_before <= clock)
    waits = and_(TASK.c.kind == kind, TASK.c.state == TaskState.PENDING, due)
    expired = and_(TASK.c.kind == kind, TASK.c.state == TaskState.LEASED, TASK.c.lease_until <= clock)
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
