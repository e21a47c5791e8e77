"""The workers that capture: which are present, on which models their engines die, and whose fault that is."""

import os
import socket
from collections.abc import Collection, Iterable
from datetime import datetime, timedelta
from itertools import chain
from typing import NamedTuple

from sqlalchemy import ColumnElement, and_, case, delete, exists, func, or_, select, update

from schemas.job import ENDED_JOB_STATES, Problem
from schemas.worker import WorkerStatus
from service.errors import (
    DiskFull,
    EngineChanged,
    EngineRefused,
    HubUnavailable,
    Outcome,
    QuarryError,
    StatesWrong,
    WriteFailed,
)
from service.store import tasks
from service.store.database import Transaction
from service.store.migration import check_write
from service.store.tables import HOST, JOB, OF_JOB, SICKNESS, TASK, WORKER
from service.store.transitions import lock_job
from service.store.values import HOME, LoneDeaths, TaskKind, TaskState, UnitLease

PAUSES = (1 / 3600, 1 / 360, 1.0)
"""Pauses after the first, the second and each further death in a row, as fractions of the full rest."""
GONE = 10
"""A silent worker's row is removed after this many times its TTL. After one TTL it no longer counts as
present.
"""
GAP_S = 45.0
"""A host without a sign of life for this long was away. With a beat on top it is less than the shortest
`host_lost_s`: otherwise a host that was cut off together with the data folder's would be lost at once.
"""
LOOK = "look in the engine's log"
FAILS = {
    StatesWrong("").problem().type: "'s states are wrong",
    WriteFailed("").problem().type: " cannot write",
    DiskFull("").problem().type: " cannot write",
    EngineRefused("").problem().type: "'s engine refuses it",
    EngineChanged("").problem().type: " has another engine",
}
"""What is said of a worker with a problem, behind its name; of any other problem, that its engine dies."""
DIED = SICKNESS.c.deaths > 0
"""True of a sickness that is more than a model which the Hub did not give, or a job that is refused."""


class Sickness(NamedTuple):
    """A model on which a worker's engine died `deaths` times in a row, the last time with `problem`.

    The worker takes no unit of it before `until`. Of a job that its engine refuses, the model is the job.
    `asked_by` is the owner of the job, None also if that is deleted.
    """

    owner: str
    host: str
    host_id: str
    model_sha256: str
    model: str
    job_id: str
    deaths: int
    problem: Problem
    until: datetime
    asked_by: str | None


def beat(
    tx: Transaction,
    owner: str,
    ttl_s: float,
    *,
    host: int = HOME,
    status: WorkerStatus | None = None,
    waits: str | None = None,
) -> None:
    """Record that this worker is present for `ttl_s` from now; remove workers that are long gone.

    `waits` says why it takes no units of jobs whose shards are removed once stored. Without a `status`, what
    it said before stays.
    """
    check_write(tx)
    until = tx.now + timedelta(seconds=ttl_s)
    before = tx.connection.scalar(select(WORKER.c.alive_until).where(WORKER.c.owner == owner))
    values = {"host": host, "pid": os.getpid(), "alive_until": until}
    said = {"status": status or WorkerStatus(), "waits": waits}
    new = tx.insert(WORKER).values(owner=owner, **values, **said)
    renewed = values if status is None else values | said
    tx.connection.execute(new.on_conflict_do_update(index_elements=["owner"], set_=renewed))
    if before is not None and before <= tx.now + timedelta(seconds=ttl_s / 2):
        # It is late: the database may have been away. Those that were there have as long to come back.
        silent = WORKER.c.alive_until.between(before - timedelta(seconds=ttl_s), tx.now)
        others = select(WORKER.c.owner).where(silent).with_for_update(skip_locked=True)
        tx.connection.execute(update(WORKER).where(WORKER.c.owner.in_(others)).values(alive_until=until))
    seen(tx, host)
    gone = select(WORKER.c.owner).where(WORKER.c.alive_until <= tx.now - timedelta(seconds=GONE * ttl_s))
    # Never waits for another row while it holds its own: those who lock all of them would deadlock with it.
    gone = gone.with_for_update(skip_locked=True)
    tx.connection.execute(delete(WORKER).where(WORKER.c.owner.in_(gone)))


def seen(tx: Transaction, host: int) -> None:
    """Record that this process's host is present, also if it captures nothing."""
    check_write(tx)
    was_away = HOST.c.seen_at < tx.now - timedelta(seconds=GAP_S)
    since = case((was_away, tx.now), else_=HOST.c.there_since)
    here = update(HOST).where(HOST.c.number == host)
    values = {"seen_at": tx.now, "there_since": since, "name": socket.gethostname(), "is_lost": False}
    tx.connection.execute(here.values(values))


def home_since(tx: Transaction) -> datetime | None:
    """Return since when the data folder's host has been seen without a gap; None if it is away."""
    is_there = HOST.c.number == HOME, HOST.c.seen_at > tx.now - timedelta(seconds=GAP_S)
    since: datetime | None = tx.connection.scalar(select(HOST.c.there_since).where(*is_there))
    return since


def leave(tx: Transaction, owner: str) -> bool:
    """Remove a worker that is ending; return whether it was resting from a model."""
    check_write(tx)
    rested = tx.connection.scalar(select(exists().where(SICKNESS.c.owner == owner, _rests(tx))))
    tx.connection.execute(delete(WORKER).where(WORKER.c.owner == owner))
    return bool(rested)


def present(tx: Transaction) -> set[str]:
    """Return the owners of the workers that are present."""
    return set(tx.connection.scalars(select(WORKER.c.owner).where(WORKER.c.alive_until > tx.clock)))


def sick(tx: Transaction, *, resting: bool = False) -> list[Sickness]:
    """Return what present workers' engines die on or refuse; with `resting`, only what they rest from.

    A model of which no job is left to capture counts only while a worker rests from it.
    """
    host = func.coalesce(HOST.c.name, ""), func.coalesce(HOST.c.id, "")
    asked_by = select(JOB.c.owner).where(JOB.c.id == SICKNESS.c.job_id).scalar_subquery()
    columns = [WORKER.c.owner, *host, *(SICKNESS.c[name] for name in Sickness._fields[3:-1]), asked_by]
    is_wanted = exists().where(OF_JOB, JOB.c.state.not_in(ENDED_JOB_STATES))
    which = _rests(tx) if resting else or_(and_(DIED, is_wanted), _rests(tx))
    there = SICKNESS.join(WORKER).outerjoin(HOST, HOST.c.number == WORKER.c.host)
    query = select(*columns).select_from(there).where(WORKER.c.alive_until > tx.clock, which)
    return [Sickness._make(row) for row in tx.connection.execute(query.order_by(WORKER.c.owner))]


def is_sick(tx: Transaction, owner: str) -> bool:
    """Return whether a worker's engine has died on a model of which it has captured no unit since."""
    return bool(tx.connection.scalar(select(exists().where(SICKNESS.c.owner == owner, DIED))))


def _rests(tx: Transaction) -> ColumnElement[bool]:
    is_refused = SICKNESS.c.model_sha256 == SICKNESS.c.job_id
    return and_(or_(SICKNESS.c.deaths >= len(PAUSES), is_refused), SICKNESS.c.until > tx.clock)


def left_by(tx: Transaction, owner: str) -> ColumnElement[bool]:
    """Return SQL for whether a worker rests from a job or its model, or its host does not capture the job."""
    away = exists().where(WORKER.c.owner == owner, WORKER.c.host != HOME)
    rests = exists().where(SICKNESS.c.owner == owner, OF_JOB, _rests(tx))
    return or_(rests, and_(JOB.c.publish_subject == JOB.c.id, away))


def waits(resting: Iterable[Sickness], of_what: str | None, owner: str | None) -> str | None:
    """Return why workers rest from a model, by its digest, or from a job, by its id.

    An error's detail may quote the job that met it, so an owner sees it of their own jobs only.
    """
    said: dict[str, None] = {}
    for one in resting:
        if one.model_sha256 == of_what:
            detail = f": {one.problem.detail}" if owner in (None, one.asked_by) else ""
            said[f"worker {one.host}{fails(one.problem)}{detail}"] = None
    return "; ".join(said) or None


def fails(problem: Problem) -> str:
    """Return what is said of a worker that fails with a problem, behind its name."""
    return FAILS.get(problem.type, "'s engine dies")


class Waits(NamedTuple):
    """Why workers take no units of some jobs, whatever their model.

    `disk` applies to jobs whose shards are removed once stored: the disk is full, and `everywhere` says that
    this is so for every worker. `away` applies to jobs that are not pushed: no worker is at the data folder.
    `starting` holds the jobs whose units are held only by workers that have no engine yet.
    """

    disk: str | None
    everywhere: bool
    away: str | None
    starting: frozenset[str]


def places(tx: Transaction) -> Waits:
    """Return what the present workers wait for."""
    query = select(WORKER.c.host, WORKER.c.waits, WORKER.c.status).where(WORKER.c.alive_until > tx.clock)
    there = tx.connection.execute(query.order_by(WORKER.c.owner)).all()
    disk = "; ".join(dict.fromkeys(row.waits for row in there if row.waits)) or None
    away = "a worker at the data folder: the job is pushed nowhere, and those that are there see none"
    is_away = bool(there) and all(row.host != HOME for row in there)
    held = {(row.status.job, row.status.engine is None) for row in there if row.status.units}
    starting = frozenset(job for job, starts in held if starts and (job, False) not in held)
    return Waits(disk, all(row.waits for row in there), away if is_away else None, starting)


def engine_died(
    tx: Transaction, lease: UnitLease, error: QuarryError, rest_s: float, *, alone: bool, sound: bool
) -> None:
    """Count a death of the worker's engine; give the unit back without counting an attempt. Raises LeaseLost.

    Other causes that keep a worker from capturing, such as its own disk, are recorded in the same way.
    `alone`: the unit ran alone; if it is at fault, it fails with a problem that names it. `sound`: the engine
    had captured another unit. A job whose states are wrong fails if `is_at_fault` says so of the workers that
    left units of it so which nobody has captured since: where the model is at fault, all units are wrong.
    """
    _held_in_turn(tx, lease)
    model_sha256 = lease.identity.model_sha256()
    before = select(SICKNESS.c.deaths).filter_by(owner=lease.owner, model_sha256=model_sha256)
    deaths = 1 + (tx.connection.scalar(before) or 0)
    until = tx.now + timedelta(seconds=PAUSES[min(deaths, len(PAUSES)) - 1] * rest_s)
    _fall_sick(tx, lease, model_sha256, deaths=deaths, problem=error.problem(), until=until)
    outcome, problem, is_wrong = Outcome.VOID, error.problem(), isinstance(error, StatesWrong)
    if alone or is_wrong:
        lone, field = lease.lone_deaths or LoneDeaths(), "wrong" if is_wrong else "sound"
        if sound or is_wrong:
            lone = lone.model_copy(update={field: (*getattr(lone, field), lease.owner)})
        of_job = (TASK.c.job_id == lease.job_id) & (TASK.c.kind == lease.kind)
        tx.connection.execute(update(TASK).where(of_job, TASK.c.item == lease.item).values(lone_deaths=lone))
        blamed_by = _wrong_by(tx, of_job) if is_wrong else lone.sound
        if is_at_fault(blamed_by, is_only_worker=_takers(tx, lease.job_id) <= {lease.owner}):
            outcome = Outcome.FAIL
            if not is_wrong:
                when = f"engines die on unit {lease.item} when it runs alone, and on no other"
                cure = f"{LOOK} for what it cannot run; submit a new job without those samples"
                problem = type(error)(f"{when}: {error.detail}", cure=cure).problem()
    tasks.fail(tx, lease, problem, outcome, max_attempts=1)


def _held_in_turn(tx: Transaction, lease: UnitLease) -> None:
    """Lock the job of a lease that is held, and the workers; record that its worker is present.

    Otherwise two workers that fall sick at once would each count on the other to take the model.
    """
    tasks.held(tx, lease)
    _lock_all(tx)
    beat(tx, lease.owner, lease.ttl_s, host=lease.host)


def _lock_all(tx: Transaction) -> None:
    """Lock all workers in order, so that none is removed, and its sicknesses with it, until this ends."""
    tx.connection.execute(select(WORKER.c.owner).order_by(WORKER.c.owner).with_for_update())
    tx.forget_time()


def _fall_sick(tx: Transaction, lease: UnitLease, model_sha256: str, **said: object) -> None:
    """Record a sickness of a lease's worker from a model, which may be a job."""
    key = {"owner": lease.owner, "model_sha256": model_sha256}
    values = {"model": lease.model, "job_id": lease.job_id, **said}
    new = tx.insert(SICKNESS).values(**key, **values)
    tx.connection.execute(new.on_conflict_do_update(index_elements=list(key), set_=values))


def untaken(tx: Transaction, model_sha256: str) -> list[Sickness]:
    """Return the sicknesses of a model whose jobs must be blocked, as no worker is left that takes them."""
    resting = [one for one in sick(tx, resting=True) if one.model_sha256 == model_sha256]
    return [one for one in resting if not _takers(tx, one.job_id)]


def _wrong_by(tx: Transaction, of_job: ColumnElement[bool]) -> list[str]:
    """Return the present workers that got units wrong which are not captured yet, one as often as it did."""
    left = select(TASK.c.lone_deaths).where(TASK.c.state != TaskState.DONE, TASK.c.lone_deaths.is_not(None))
    wrong_by = chain.from_iterable(one.wrong for one in tx.connection.scalars(left.where(of_job)))
    there = present(tx)
    return [owner for owner in wrong_by if owner in there]


def _takers(tx: Transaction, job_id: str) -> set[str]:
    """Return the workers that are there and take units of a job.

    They see it, rest neither from it nor from its model, and have no engine, or the one that it was begun
    with.
    """
    job = select(JOB.c.publish_subject, JOB.c.provenance, JOB.c.model_sha256).where(JOB.c.id == job_id)
    row = tx.connection.execute(job).one_or_none()
    if row is None:
        return set()  # deleted meanwhile
    of_job = SICKNESS.c.model_sha256.in_((row.model_sha256, job_id))
    rests = exists().where(SICKNESS.c.owner == WORKER.c.owner, of_job)
    query = select(WORKER.c.owner, WORKER.c.status).where(WORKER.c.alive_until > tx.clock)
    query = query.where(~rests.where(_rests(tx)))
    if row.publish_subject == job_id:
        query = query.where(WORKER.c.host == HOME)
    there, begun = tx.connection.execute(query).all(), row.provenance
    return {one.owner for one in there if begun is None or one.status.engine in (None, begun.engine.title)}


def pass_on(tx: Transaction, lease: UnitLease, error: QuarryError, rest_s: float) -> None:
    """Leave a job that an engine cannot capture to other workers, or end it if none takes it.

    The other workers that are there and hold no engine now may have the right one. This one looks again when
    any of them that was killed is known to be gone, and after each further `rest_s`. Raises LeaseLost.
    """
    _held_in_turn(tx, lease)
    outcome, problem = error.outcome, error.problem()
    if _takers(tx, lease.job_id) - {lease.owner}:
        outcome = Outcome.VOID
        key = {"owner": lease.owner, "model_sha256": lease.job_id}
        before = tx.connection.scalar(select(SICKNESS.c.until).filter_by(**key))
        if before is None or before <= tx.now:  # else another unit of the same engine was refused, too
            until = tx.now + timedelta(seconds=lease.ttl_s if before is None else rest_s)
            _fall_sick(tx, lease, lease.job_id, deaths=0, problem=problem, until=until)
    tasks.fail(tx, lease, problem, outcome, max_attempts=1)


def failed(
    tx: Transaction, lease: UnitLease, error: QuarryError, max_attempts: int, hub_attempts: int
) -> None:
    """End an attempt at a unit as `tasks.fail` does. Raises LeaseLost.

    Where it met no Hub, its worker takes no unit of the model either while this one waits: all of them would
    meet none, one after another, while other jobs wait.
    """
    tasks.fail(tx, lease, error.problem(), error.outcome, max_attempts, error.wait_s, hub_attempts)
    is_there = select(WORKER.c.owner).where(WORKER.c.owner == lease.owner).with_for_update()
    if not isinstance(error, HubUnavailable) or tx.connection.scalar(is_there) is None:
        return
    task = (TASK.c.job_id == lease.job_id) & (TASK.c.kind == lease.kind) & (TASK.c.item == lease.item)
    until = tx.connection.scalar(select(TASK.c.not_before).where(task))
    key = {"owner": lease.owner, "model_sha256": lease.identity.model_sha256()}
    said = {"model": lease.model, "job_id": lease.job_id, "problem": error.problem(), "until": until}
    if until is not None:
        new = tx.insert(SICKNESS).values(**key, **said, deaths=0)
        later = {"index_elements": list(key), "set_": {"until": until}, "where": SICKNESS.c.until < until}
        tx.connection.execute(new.on_conflict_do_update(**later))


def block(tx: Transaction, sickness: Sickness) -> None:
    """Block the job on which an engine died last, unless a worker takes it by now. Raises NotFound."""
    lock_job(tx, sickness.job_id)
    if _takers(tx, sickness.job_id):
        return
    problem = sickness.problem
    where = f"worker {sickness.host}{fails(problem)}, and no other worker takes the model"
    told = {"detail": f"{where}: {problem.detail}", "cure": f"{problem.cure or LOOK}; then resume"}
    tasks.block(tx, TaskKind.CAPTURE, sickness.job_id, problem.model_copy(update=told))


def proven(tx: Transaction, lease: UnitLease) -> None:
    """Forget the deaths of a worker's engine on a model, now that it has captured a probe of it."""
    key = {"owner": lease.owner, "model_sha256": lease.identity.model_sha256()}
    tx.connection.execute(delete(SICKNESS).filter_by(**key))


def try_again(tx: Transaction, job_id: str) -> None:
    """Let every worker that rests from a job or its model probe it again now."""
    forget_refusals(tx, job_id)
    of_job = exists().where(JOB.c.id == job_id, OF_JOB)
    tx.connection.execute(update(SICKNESS).where(of_job).values(until=tx.now))


def forget_refusals(tx: Transaction, job_id: str) -> None:
    """Forget which workers' engines refused a job, as if none had looked at it."""
    _lock_all(tx)
    tx.connection.execute(delete(SICKNESS).where(SICKNESS.c.model_sha256 == job_id))


def is_at_fault(blamed_by: Collection[str], *, is_only_worker: bool) -> bool:
    """Return whether a unit is at fault for the deaths of engines that ran it alone, each after another unit.

    The same rule says whether a model is at fault for states that engines get wrong. `blamed_by` lists their
    workers: two different ones, or the only worker twice, are enough. A unit's first death alone never
    counts, since the engine before it had died, too.
    """
    return len(set(blamed_by)) > 1 or (is_only_worker and len(blamed_by) > 1)
