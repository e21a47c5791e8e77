"""Units: leased to one attempt at a time, kept, given back, and failed."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta

from sqlalchemy import ColumnElement, and_, exists, or_, select, update

from schemas.job import JobState, Problem, UnitState
from schemas.receipts import UnitKey
from schemas.request import ExtractRequest
from service.errors import LeaseLost, Outcome, QuarryError
from service.store.database import Transaction
from service.store.ledger import UNIT_COLUMNS, LockedJob, LockedUnit, lock_job, move_unit
from service.store.stopping import stop, void
from service.store.tables import JOB, UNIT
from service.store.values import UnitLease, UnitRow

SILENT_DEATHS = 10
"""Workers that may vanish over one unit, killed or crashed, before its job waits for a person.

More than the attempts that a unit has: a node that restarts is no fault of the unit that it happened to hold.
Bounded all the same, since a unit that kills its worker would start the engine anew for ever.
"""


def next_job(tx: Transaction, prefer_job: str | None) -> str | None:
    """Return the job of the next lease: the preferred one if it has work, else the oldest that has."""
    waiting = exists().where(UNIT.c.job_id == JOB.c.id, _leasable(tx))
    query = select(JOB.c.id).where(JOB.c.state == JobState.RUNNING, waiting)
    return tx.connection.scalar(query.order_by(JOB.c.id != prefer_job, JOB.c.number).limit(1))


def lease(
    tx: Transaction, job_id: str, request: ExtractRequest, owner: str, ttl_s: float
) -> UnitLease | None:
    """Lease the lowest unit of a job that is free; none if others were faster or the job was stopped.

    A lease that ran out is one that its worker neither kept nor gave back: the worker died without a word.
    That counts as a death and not as an attempt; with the last death that it may cost, a unit blocks its job.
    """
    job = lock_job(tx, job_id)
    if job.state is not JobState.RUNNING:
        return None
    free = select(*UNIT_COLUMNS).where(UNIT.c.job_id == job_id, _leasable(tx)).order_by(UNIT.c.unit).limit(1)
    row = tx.connection.execute(free).mappings().one_or_none()
    if row is None:
        return None
    before = LockedUnit(**row)
    waiting = _after_death(before) if before.state is UnitState.LEASED else before
    if waiting.silent_deaths >= SILENT_DEATHS:
        _stop_killing_workers(tx, job, before, waiting)
        return None
    after = replace(
        waiting,
        state=UnitState.LEASED,
        epoch=waiting.epoch + 1,
        attempts=waiting.attempts + 1,
        owner=owner,
        lease_until=tx.now + timedelta(seconds=ttl_s),
    )
    move_unit(tx, job, before, after)
    key = UnitKey(job_id=job_id, unit=after.unit, epoch=after.epoch)
    return UnitLease(
        key=key,
        owner=owner,
        request=request,
        identity=job.known_identity,
        num_samples=after.num_samples,
        num_tokens=after.num_tokens,
        attempts=after.attempts,
        plan_sha256=after.plan_sha256,
    )


def held(tx: Transaction, key: UnitKey, owner: str) -> tuple[LockedJob, LockedUnit]:
    """Lock the job of a unit that is still leased to this attempt. Raises LeaseLost."""
    job = lock_job(tx, key.job_id)
    query = select(*UNIT_COLUMNS).where(_mine(key, owner))
    row = tx.connection.execute(query).mappings().one_or_none()
    if row is None:
        raise LeaseLost(f"{owner} no longer holds epoch {key.epoch} of unit {key.unit} of job {key.job_id}")
    return job, LockedUnit(**row)


def extend(tx: Transaction, job_id: str, keys: Sequence[UnitKey], owner: str, ttl_s: float) -> list[UnitKey]:
    """Let the leases on units of one job run for `ttl_s` from now; return those that are lost."""
    lock_job(tx, job_id)
    until = tx.now + timedelta(seconds=ttl_s)
    lost = []
    for key in keys:
        kept = update(UNIT).where(_mine(key, owner)).values(lease_until=until)
        if tx.connection.execute(kept).rowcount == 0:
            lost.append(key)
    return lost


def release(tx: Transaction, key: UnitKey, owner: str) -> None:
    """Give a unit back as if this attempt had not been. Raises LeaseLost."""
    job, unit = held(tx, key, owner)
    move_unit(tx, job, unit, void(unit))


def fail(
    tx: Transaction, key: UnitKey, owner: str, problem: Problem, outcome: Outcome, max_attempts: int
) -> None:
    """End an attempt with a problem: fail, try again, or void or block uncounted. Raises LeaseLost."""
    job, unit = held(tx, key, owner)
    waiting = replace(void(unit), problem=problem)
    if outcome is Outcome.VOID:
        move_unit(tx, job, unit, waiting, problem)
    elif outcome is Outcome.BLOCK:
        stop(tx, move_unit(tx, job, unit, waiting, problem), JobState.BLOCKED, problem)
    elif outcome is Outcome.RETRY and unit.attempts < max_attempts:
        move_unit(tx, job, unit, replace(waiting, attempts=unit.attempts), problem)
    else:
        failed = replace(waiting, state=UnitState.FAILED, attempts=unit.attempts)
        stop(tx, move_unit(tx, job, unit, failed, problem, units_failed=1), JobState.FAILED, problem)


def forgive(tx: Transaction, job: LockedJob) -> None:
    """Forget the silent deaths over the units of a locked job; where the units stand does not change."""
    of_job = update(UNIT).where(UNIT.c.job_id == job.id, UNIT.c.silent_deaths > 0)
    tx.connection.execute(of_job.values(silent_deaths=0))


def units(tx: Transaction, job_id: str) -> list[UnitRow]:
    """Return the units of a job, lowest first."""
    columns = [UNIT.c[name] for name in UnitRow.__slots__]
    query = select(*columns).where(UNIT.c.job_id == job_id).order_by(UNIT.c.unit)
    return [UnitRow(**row) for row in tx.connection.execute(query).mappings()]


def _after_death(unit: LockedUnit) -> LockedUnit:
    """Return a unit whose lease ran out as it waits for its next attempt."""
    return replace(void(unit), silent_deaths=unit.silent_deaths + 1)


def _stop_killing_workers(tx: Transaction, job: LockedJob, before: LockedUnit, waiting: LockedUnit) -> None:
    problem = QuarryError(
        f"{waiting.silent_deaths} workers died without a word while they held unit {waiting.unit}; "
        "a worker holds several units at once, so another of them may be at fault",
        cure="look in the kernel's log for workers that were killed for want of memory; give them more of "
        "it, or submit a new job with a smaller storage.shard_bytes; `resume` tries again",
    ).problem()
    job = move_unit(tx, job, before, replace(waiting, problem=problem), problem)
    stop(tx, job, JobState.BLOCKED, problem)


def _leasable(tx: Transaction) -> ColumnElement[bool]:
    """Return the condition that a unit waits, or that its lease ran out."""
    expired = and_(UNIT.c.state == UnitState.LEASED, UNIT.c.lease_until <= tx.now)
    return or_(UNIT.c.state == UnitState.PENDING, expired)


def _mine(key: UnitKey, owner: str) -> ColumnElement[bool]:
    """Return the condition that fences every write of an attempt; stopping a job voids its leases, too."""
    return and_(
        UNIT.c.job_id == key.job_id,
        UNIT.c.unit == key.unit,
        UNIT.c.epoch == key.epoch,
        UNIT.c.owner == owner,
        UNIT.c.state == UnitState.LEASED,
    )
