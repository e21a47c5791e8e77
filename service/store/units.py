"""Units: leasing them for capture with what an attempt needs, and listing them."""

from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from sqlalchemy import Select, and_, exists, func, or_, select

from schemas.job import Problem
from schemas.receipts import NOT_FINITE
from service.errors import LeaseLost
from service.store import tasks, workers
from service.store.database import Store, Transaction
from service.store.tables import JOB, REJECT, SICKNESS, TASK, UNIT, UNIT_COMMIT, UNIT_PLAN
from service.store.task_choice import Choice
from service.store.transitions import LockedJob
from service.store.values import HOME, Lease, TaskKind, TaskState, UnitLease, UnitRow

OF_UNIT = (TASK.c.job_id == UNIT.c.job_id) & (TASK.c.item == UNIT.c.unit)


def lease(
    store: Store,
    owner: str,
    ttl_s: float,
    *,
    prefer_job: str | None = None,
    is_full: bool = False,
    host: int = HOME,
) -> UnitLease | None:
    """Lease the lowest free unit of the preferred job, or otherwise of the oldest job that has one.

    Skips models and jobs from which the worker is waiting and, if the disk `is_full`, jobs whose shards are
    removed once stored. Away from the data folder, takes only jobs that are pushed, whose shards are always
    removed there once stored. If the worker's engine has died, units on which an engine died while they ran
    alone come last: another unit tells more about whose fault it was.
    """
    take = partial(tasks.lease, store, TaskKind.CAPTURE, partial(_grant, host=host), owner, ttl_s)
    choice = Choice(prefer_job, is_full=is_full, host=host)
    any_unit, no_lone = (replace(choice, spares_lone=spares) for spares in (False, True))
    if not store.read(workers.is_sick, owner):
        return take(any_unit)
    if (other := take(no_lone)) is not None or (lone := take(any_unit)) is None:
        return other
    # The worker's wait may have ended between the two: look once more.
    if (other := take(no_lone)) is not None:
        with suppress(LeaseLost):
            store.write(tasks.release, lone)
        return other
    return lone


def _grant(tx: Transaction, job: LockedJob, lease: Lease, *, host: int) -> UnitLease:
    plan = UNIT_PLAN.c.content.label("plan"), UNIT_PLAN.c.sha256.label("plan_sha256"), UNIT_PLAN.c.is_answered
    of_unit = (UNIT.c.num_samples, UNIT.c.num_tokens, *plan)
    of_model = SICKNESS.c.owner == lease.owner, SICKNESS.c.model_sha256 == JOB.c.model_sha256
    is_probe = exists().where(*of_model, workers.DIED).label("is_probe")
    query = select(*of_unit, TASK.c.lone_deaths, TASK.c.deaths, is_probe).join(TASK, OF_UNIT)
    query = query.join(JOB, JOB.c.id == job.id)
    query = query.join(UNIT_PLAN, (UNIT_PLAN.c.job_id == UNIT.c.job_id) & (UNIT_PLAN.c.unit == UNIT.c.unit))
    of_lease = (UNIT.c.job_id == job.id) & (UNIT.c.unit == lease.item) & (TASK.c.kind == lease.kind)
    unit = tx.connection.execute(query.where(of_lease)).mappings().one()
    return UnitLease(
        **lease.fields(),
        identity=job.known_identity,
        skips_canary=job.skips_canary,
        keeps_local=job.keeps_local and host == HOME,
        host=host,
        engine=job.provenance.engine.title if job.provenance is not None else None,
        **unit,
    )


def needs_attempt(tx: Transaction, job_id: str, unit: int, epoch: int) -> bool:
    """Return whether an attempt's files are needed: it is leased, or was committed and is not stored."""
    place = (TASK.c.job_id == job_id) & (TASK.c.kind == TaskKind.CAPTURE) & (TASK.c.item == unit)
    of_unit = UNIT_COMMIT.c.job_id == job_id, UNIT_COMMIT.c.unit == unit, ~UNIT_COMMIT.c.is_stored
    committed = and_(TASK.c.state == TaskState.DONE, exists().where(*of_unit))
    good = (TASK.c.epoch == epoch) & or_(TASK.c.state == TaskState.LEASED, committed)
    return tx.connection.scalar(select(TASK.c.item).where(place, good)) is not None


def is_not_finite(tx: Transaction, lease: UnitLease, problem: Problem) -> bool:
    """Say whether an earlier attempt at the unit ended with `problem`, which names rows that are not finite.

    Or, where each attempt gets other answers, with other rows. Or whether the job has rejects for that
    already.
    """
    place = (TASK.c.job_id == lease.job_id) & (TASK.c.kind == lease.kind) & (TASK.c.item == lease.item)
    before = tx.connection.scalar(select(TASK.c.problem).where(place))
    is_kind = lease.answers_anew and before is not None and before.type == problem.type
    return before == problem or is_kind or left_not_finite(tx, lease.job_id)


def left_not_finite(tx: Transaction, job_id: str) -> bool:
    """Say whether a job's units have rejected rows as not finite."""
    rejects = select(REJECT.c.entry).where(REJECT.c.job_id == job_id, REJECT.c.unit.is_not(None))
    return any(reject.reason == NOT_FINITE for reject in tx.connection.scalars(rejects))


def of_job(tx: Transaction, job_id: str) -> list[UnitRow]:
    """Return the units of a job, lowest first."""
    return _rows(tx, _captures(job_id).order_by(UNIT.c.unit))


def open_units(tx: Transaction, job_id: str, limit: int) -> list[UnitRow]:
    """Return up to `limit` units of a job: those that have failed, then those that are leased."""
    unsettled = _captures(job_id).where(TASK.c.state.in_((TaskState.FAILED, TaskState.LEASED)))
    return _rows(tx, unsettled.order_by(TASK.c.state, TASK.c.item).limit(limit))


def in_work(tx: Transaction, job_id: str) -> int:
    """Return how many units of a job are leased."""
    leased = TASK.c.job_id == job_id, TASK.c.kind == TaskKind.CAPTURE, TASK.c.state == TaskState.LEASED
    return tx.connection.execute(select(func.count()).select_from(TASK).where(*leased)).scalar_one()


def _captures(job_id: str) -> Select[Any]:
    columns = [UNIT.c[name] if name in UNIT.c else TASK.c[name] for name in UnitRow.__slots__]
    of_job = (TASK.c.job_id == job_id) & (TASK.c.kind == TaskKind.CAPTURE)
    return select(*columns).join(TASK, OF_UNIT).where(of_job)


def _rows(tx: Transaction, query: Select[Any]) -> list[UnitRow]:
    return [UnitRow(**row) for row in tx.connection.execute(query).mappings()]
