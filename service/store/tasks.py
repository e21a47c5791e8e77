"""Tasks: the work to do for a job, each leased to one owner at a time.

An expired lease is valid until another owner takes the task: its holder is fenced by the epoch, never by
time.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from functools import partial
from typing import TypeVar

from sqlalchemy import and_, bindparam, delete, or_, select, update

from schemas.job import JobState, Problem
from service.errors import (
    STORE_AWAY,
    HubLimited,
    HubUnavailable,
    IllegalMove,
    LeaseLost,
    NotFound,
    Outcome,
    QuarryError,
    internal_error,
    problem_slug,
)
from service.store.database import Store, Transaction
from service.store.migration import check_write
from service.store.policies import HUB_DELAYS, POLICIES, task_name
from service.store.stopping import UNLEASED, stop, void
from service.store.tables import PAUSE, TASK
from service.store.task_choice import ANY, Choice, jobs_with_work, lowest_free
from service.store.transitions import (
    TASK_COLUMNS,
    LockedJob,
    LockedTask,
    add_task,
    lock_job,
    move_job,
    move_task,
    record,
)
from service.store.values import ALONE_AFTER, Lease, TaskKind, TaskState

logger = logging.getLogger(__name__)

AnyLease = TypeVar("AnyLease", bound=Lease)

OF_HUB = frozenset(f"urn:quarry:{problem_slug(kind)}" for kind in (HubUnavailable, HubLimited))
HUB_CURE = "look at the Hub's status, and at the way there from the host; then resume the job"

HELD_BACK = timedelta(hours=1)
"""How long the tasks of a job wait that can be neither leased nor blocked: until then, others are leased."""

_ATTEMPT = ("job_id", "kind", "item", "epoch", "owner")
_MINE = and_(
    *(TASK.c[name] == bindparam(f"of_{name}") for name in _ATTEMPT),
    TASK.c.state == TaskState.LEASED,
)
"""The condition that fences every write of an attempt; stopping a job also voids its leases."""
_OF_OWNER = [TASK.c[name] == bindparam(f"of_{name}") for name in ("job_id", "kind", "owner")]
_HELD = select(*TASK_COLUMNS).where(*_OF_OWNER, TASK.c.state == TaskState.LEASED)
_HELD = _HELD.order_by(TASK.c.item).with_for_update()
"""Locks all that the owner holds of the job, in the order of `extend`: the end of one may end all of them."""
_UNITS = select(TASK.c.item).where(TASK.c.job_id == bindparam("of_job_id"), TASK.c.kind == TaskKind.CAPTURE)
_UNITS = _UNITS.where(TASK.c.state == TaskState.LEASED).order_by(TASK.c.item).with_for_update()
"""Locks the leased units of a job, which come before its storing in that order."""
_DIED = UNLEASED | {"attempts": TASK.c.attempts - 1, "deaths": TASK.c.deaths + 1}
"""What becomes of a task whose lease expired."""
_EXTENDED = update(TASK).where(_MINE).values(lease_until=bindparam("until"))


def _attempt(lease: Lease) -> dict[str, object]:
    """Return the bound parameters of `_MINE`."""
    return {f"of_{name}": getattr(lease, name) for name in _ATTEMPT}


def begin_again(tx: Transaction, job: LockedJob, kind: TaskKind, item: int) -> None:
    """Replace a task of a locked job by a fresh one that is due at once; a running attempt is fenced."""
    same = (TASK.c.job_id == job.id) & (TASK.c.kind == kind) & (TASK.c.item == item)
    epoch = tx.connection.execute(delete(TASK).where(same).returning(TASK.c.epoch)).scalar_one()
    add_task(tx, job, kind, item, epoch=epoch)


def lease(
    store: Store,
    kind: TaskKind,
    grant: Callable[[Transaction, LockedJob, Lease], AnyLease],
    owner: str,
    ttl_s: float,
    choice: Choice = ANY,
) -> AnyLease | None:
    """Try job after job, each in its own transaction, until one has a free task; `grant` makes the lease.

    On the way, a job is blocked if too many owners died while holding the task to be leased. One whose task
    cannot be leased is blocked, too; where it cannot be, since it has ended or its own row is damaged, its
    tasks wait for `HELD_BACK`. So do those of a kind that is retried for ever: a report blocks no job.
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
            end = partial(block, problem=internal_error(error).problem())
            try:
                store.write(_hold_back if POLICIES[kind].exhausted is Outcome.VOID else end, kind, job_id)
            except (NotFound, IllegalMove, ValueError, LookupError):
                store.write(_hold_back, kind, job_id)
    return None


def _hold_back(tx: Transaction, kind: TaskKind, job_id: str) -> None:
    """Let a job's free tasks of a kind wait, without a look at the job's row, which may be damaged.

    An expired lease is ended: a longer one would keep the task's subject, and its owner's other jobs.
    """
    check_write(tx)
    until = {"not_before": tx.now + HELD_BACK}
    of_kind = TASK.c.job_id == job_id, TASK.c.kind == kind
    tx.connection.execute(select(TASK.c.item).where(*of_kind).order_by(TASK.c.item).with_for_update())
    expired = TASK.c.state == TaskState.LEASED, TASK.c.lease_until <= tx.now
    tx.connection.execute(update(TASK).where(*of_kind, *expired).values(_DIED | until))
    due = TASK.c.state == TaskState.PENDING, or_(TASK.c.not_before.is_(None), TASK.c.not_before <= tx.now)
    tx.connection.execute(update(TASK).where(*of_kind, *due).values(until))


def block(tx: Transaction, kind: TaskKind, job_id: str, problem: Problem) -> None:
    """Block a job, unless its tasks of a kind are no longer worked on. Raises NotFound."""
    job = lock_job(tx, job_id)
    if job.state in POLICIES[kind].job_states:
        stop(tx, job, JobState.BLOCKED, problem)


def _next_job(tx: Transaction, kind: TaskKind, owner: str, choice: Choice = ANY) -> str | None:
    """Return the next job: the preferred one if none has higher priority, else the oldest of the highest."""
    query = jobs_with_work(tx.clock, kind, choice.spares_lone, choice.outranking is not None)
    job_id: str | None = tx.connection.scalar(query, asdict(choice) | {"by_owner": owner})
    return job_id


def _take(
    tx: Transaction, kind: TaskKind, job_id: str, owner: str, ttl_s: float, choice: Choice = ANY
) -> tuple[LockedJob, Lease] | None:
    """Lease the lowest free task of a kind; return None if others were faster or the job was stopped.

    An expired lease was neither extended nor released, so its owner died. That counts as a death, not as an
    attempt. A task that reaches the maximum number of deaths blocks its job; before, it may rest.
    """
    policy = POLICIES[kind]
    try:
        job = lock_job(tx, job_id)
    except NotFound:
        return None  # deleted meanwhile
    if job.state not in policy.job_states:
        return None
    if policy.one_a_subject:
        _lock_subject(tx, kind, job.publish_subject)
    query = lowest_free(tx.clock, kind, choice.spares_lone)
    row = tx.connection.execute(query, {"job_id": job_id, "host": choice.host}).mappings().one_or_none()
    if row is None:
        return None
    before = LockedTask(**row)
    waiting = before
    if before.state is TaskState.LEASED:
        waiting = replace(void(before), deaths=before.deaths + 1)
    if waiting.deaths >= policy.max_deaths:
        detail = f"{waiting.deaths} {policy.blame.format(item=before.item)}"
        problem = QuarryError(detail, cure=policy.cure).problem()
        if before.state is TaskState.LEASED:  # else the last death was counted by the subject's next owner
            job = move_task(tx, job, before, replace(waiting, problem=problem), problem)
        stop(tx, job, JobState.BLOCKED, problem)
        return None
    if policy.rests and before.state is TaskState.LEASED and waiting.deaths >= ALONE_AFTER:
        rest_s = ttl_s * min(2 ** (waiting.deaths - ALONE_AFTER), HUB_DELAYS[1])
        detail = f"{waiting.deaths} {policy.blame}; the next one begins in {rest_s:.0f} s"
        problem = QuarryError(detail, cure=policy.cure).problem()
        rested = replace(waiting, not_before=tx.now + timedelta(seconds=rest_s))
        move_task(tx, job, before, rested, problem)
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
        leased_at=tx.now,
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

    Raises LeaseLost, also if the job was deleted.
    """
    what = f"epoch {lease.epoch} of the {task_name(lease.kind, lease.item)} of job {lease.job_id}"
    lost = LeaseLost(f"{lease.owner} no longer holds {what}")
    try:
        job = lock_job(tx, lease.job_id)
    except NotFound as error:
        raise lost from error
    if lease.kind is TaskKind.STORE:  # it may end the units that its worker holds, too
        tx.connection.execute(_UNITS, _attempt(lease))
    for row in tx.connection.execute(_HELD, _attempt(lease)).mappings().all():
        if (row["item"], row["epoch"]) == (lease.item, lease.epoch):
            return job, LockedTask(**row)
    raise lost


def extend(tx: Transaction, leases: Sequence[AnyLease], ttl_s: float) -> list[AnyLease]:
    """Extend leases to `ttl_s` from now; return those that are lost."""
    check_write(tx)
    until = tx.now + timedelta(seconds=ttl_s)
    lost = []
    for lease in sorted(leases, key=lambda lease: (lease.job_id, lease.kind, lease.item)):
        if tx.connection.execute(_EXTENDED, _attempt(lease) | {"until": until}).rowcount == 0:
            lost.append(lease)
    return lost


def done(tx: Transaction, job: LockedJob, task: LockedTask, **deltas: int) -> LockedJob:
    """Mark a held task as done; `deltas` are added to the job's counters."""
    after = replace(task, state=TaskState.DONE, owner=None, lease_until=None, problem=None)
    return move_task(tx, job, task, after, None, **deltas)


def forgive(tx: Transaction, task: LockedTask) -> None:
    """Forget the earlier attempts and deaths of a held task, since it makes progress now."""
    if task.attempts > 1 or task.deaths:
        same = and_(TASK.c.job_id == task.job_id, TASK.c.kind == task.kind, TASK.c.item == task.item)
        tx.connection.execute(update(TASK).where(same).values(attempts=1, deaths=0))


def release(tx: Transaction, lease: Lease) -> None:
    """Give a task back as if this attempt had not happened. Raises LeaseLost."""
    job, task = held(tx, lease)
    move_task(tx, job, task, void(task))


def put_off(tx: Transaction, job: LockedJob, task: LockedTask, wait: timedelta) -> None:
    """Let a held task wait, as if it had not been tried yet."""
    fresh = replace(void(task), attempts=0, deaths=0, problem=None)
    move_task(tx, job, task, replace(fresh, not_before=tx.now + wait))


def pause(tx: Transaction, subject: str, wait: timedelta) -> None:
    """Keep everybody from storing in a repository for `wait`; a longer existing pause is kept."""
    until = tx.now + wait
    new = tx.insert(PAUSE).values(subject=subject, until=until)
    longer = PAUSE.c.until < until
    tx.connection.execute(
        new.on_conflict_do_update(index_elements=["subject"], set_={"until": until}, where=longer)
    )


def release_owner(tx: Transaction, owner: str) -> None:
    """Release all tasks of an owner that is ending, so that nobody waits for them.

    They count neither as failures nor as deaths.
    """
    check_write(tx)
    mine = TASK.c.owner == owner, TASK.c.state == TaskState.LEASED
    in_order = select(TASK.c.item).where(*mine).order_by(TASK.c.job_id, TASK.c.kind, TASK.c.item)
    tx.connection.execute(in_order.with_for_update())  # a step that has not ended yet may lock them, too
    given_back = UNLEASED | {"attempts": TASK.c.attempts - 1}
    tx.connection.execute(update(TASK).where(*mine).values(given_back))


def fail(
    tx: Transaction,
    lease: Lease,
    problem: Problem,
    outcome: Outcome,
    max_attempts: int,
    wait_s: float = 0.0,
    hub_attempts: int | None = None,
) -> None:
    """End an attempt with a problem. Raises LeaseLost.

    RETRY makes the task pending again until it has had `max_attempts`; then the outcome is the policy's
    `exhausted`. FAIL fails the job at once. BLOCK blocks it. Neither BLOCK nor VOID counts the attempt. Every
    outcome is treated as VOID if `exhausted` is VOID, and all but FAIL while the task is done `ahead`. With
    `told_by_job`, a repeated problem is not recorded again. A pending task waits for at least `wait_s`, and
    so does the repository of one that writes to it.

    With `spares_hub`, a task may fail to reach the Hub `hub_attempts` times in a row, with longer waits; then
    its job is blocked. Its other failures are counted from the start again afterwards.
    """
    policy = POLICIES[lease.kind]
    job, task = held(tx, lease)
    is_ahead = policy.ahead and not job.progress.is_captured
    if policy.exhausted is Outcome.VOID or (is_ahead and outcome is not Outcome.FAIL):
        outcome = Outcome.VOID
    met_no_hub = policy.spares_hub and _is_of_hub(problem)
    if policy.spares_hub and met_no_hub != _is_of_hub(task.problem):
        task = replace(task, attempts=1)
    waiting = replace(void(task), problem=problem)
    if outcome is Outcome.RETRY:
        waiting = replace(waiting, attempts=task.attempts)
        if met_no_hub and task.attempts >= (hub_attempts or max_attempts):
            outcome, problem = Outcome.BLOCK, problem.model_copy(update={"cure": HUB_CURE})
        elif not met_no_hub and task.attempts >= max_attempts:
            outcome = policy.exhausted
    if outcome is Outcome.FAIL:
        failed = replace(waiting, state=TaskState.FAILED, attempts=task.attempts)
        job = move_task(tx, job, task, failed, problem, units_failed=int(policy.of_units))
        stop(tx, job, JobState.FAILED, problem)
    elif outcome is Outcome.BLOCK:
        stop(tx, move_task(tx, job, task, waiting, problem), JobState.BLOCKED, problem)
    else:
        delay, longest = HUB_DELAYS if met_no_hub else (policy.delay, 1.0)
        delay_s = min(delay * 2 ** max(waiting.attempts - 1, 0), longest) * lease.ttl_s
        delay_s = max(delay_s, wait_s)
        if policy.told_by_job and problem != job.problem:
            message = f"{lease.kind} is tried again"
            job = record(tx, replace(job, problem=problem), "progress", message, problem)
        after = replace(waiting, not_before=tx.now + timedelta(seconds=delay_s))
        move_task(tx, job, task, after, None if policy.told_by_job else problem)
        if wait_s and policy.told_by_job:
            pause(tx, job.publish_subject, timedelta(seconds=wait_s))


def _is_of_hub(problem: Problem | None) -> bool:
    return problem is not None and problem.type in OF_HUB


def _lock_subject(tx: Transaction, kind: TaskKind, subject: str) -> None:
    """Keep other transactions from leasing a task of the subject until this one ends."""
    same = and_(TASK.c.kind == kind, TASK.c.subject == subject)
    tx.connection.execute(select(TASK.c.job_id).where(same).order_by(TASK.c.job_id).with_for_update())
    tx.forget_time()


def _end_others(tx: Transaction, task: LockedTask) -> None:
    """End an expired lease on a task of another job with the same subject, if there is one."""
    other = and_(TASK.c.kind == task.kind, TASK.c.subject == task.subject, TASK.c.job_id != task.job_id)
    tx.connection.execute(update(TASK).where(other, TASK.c.state == TaskState.LEASED).values(_DIED))
