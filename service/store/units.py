"""Units: leased for capture with what an attempt needs, and listed."""

from contextlib import suppress
from functools import partial

from sqlalchemy import exists, select

from service.errors import LeaseLost
from service.store import tasks, workers
from service.store.database import Store, Transaction
from service.store.tables import JOB, SICKNESS, TASK, UNIT, UNIT_PLAN
from service.store.task_choice import Choice
from service.store.transitions import LockedJob
from service.store.values import Lease, TaskKind, TaskState, UnitLease, UnitRow

OF_UNIT = (TASK.c.job_id == UNIT.c.job_id) & (TASK.c.item == UNIT.c.unit)


def lease(
    store: Store, owner: str, ttl_s: float, *, prefer_job: str | None = None, is_full: bool = False
) -> UnitLease | None:
    """Lease the lowest free unit of the preferred job, or else of the oldest that has one.

    None of a model that the worker waits for, and where the disk `is_full` none of a job whose shards go when
    they are stored. Where its engine has died, one on which an engine died alone comes last: another one says
    more of whose fault it is.
    """
    take = partial(tasks.lease, store, TaskKind.CAPTURE, _grant, owner, ttl_s)
    any_unit, no_lone = (Choice(prefer_job, spares_lone=spares, is_full=is_full) for spares in (False, True))
    if not store.read(workers.is_sick, owner):
        return take(any_unit)
    if (other := take(no_lone)) is not None or (lone := take(any_unit)) is None:
        return other
    # Between the two the worker's wait may have ended: look once more, now that it has.
    if (other := take(no_lone)) is not None:
        with suppress(LeaseLost):
            store.write(tasks.release, lone)
        return other
    return lone


def _grant(tx: Transaction, job: LockedJob, lease: Lease) -> UnitLease:
    of_unit = (UNIT.c.num_samples, UNIT.c.num_tokens, UNIT_PLAN.c.content.label("plan"), UNIT.c.plan_sha256)
    of_model = SICKNESS.c.owner == lease.owner, SICKNESS.c.model_sha256 == JOB.c.model_sha256
    is_probe = exists().where(*of_model).label("is_probe")
    query = select(*of_unit, TASK.c.lone_deaths, is_probe).join(TASK, OF_UNIT).join(JOB, JOB.c.id == job.id)
    query = query.join(UNIT_PLAN, (UNIT_PLAN.c.job_id == UNIT.c.job_id) & (UNIT_PLAN.c.unit == UNIT.c.unit))
    of_lease = (UNIT.c.job_id == job.id) & (UNIT.c.unit == lease.item) & (TASK.c.kind == lease.kind)
    unit = tx.connection.execute(query.where(of_lease)).mappings().one()
    return UnitLease(
        **lease.fields(),
        identity=job.known_identity,
        skips_canary=job.skips_canary,
        keeps_local=job.keeps_local,
        **unit,
    )


def needs_attempt(tx: Transaction, job_id: str, unit: int, epoch: int) -> bool:
    """Say whether an attempt's files are needed: it is leased, or was committed."""
    place = (TASK.c.job_id == job_id) & (TASK.c.kind == TaskKind.CAPTURE) & (TASK.c.item == unit)
    good = (TASK.c.epoch == epoch) & TASK.c.state.in_((TaskState.LEASED, TaskState.DONE))
    return tx.connection.scalar(select(TASK.c.item).where(place, good)) is not None


def of_job(tx: Transaction, job_id: str) -> list[UnitRow]:
    """Return the units of a job, lowest first."""
    columns = [UNIT.c[name] if name in UNIT.c else TASK.c[name] for name in UnitRow.__slots__]
    of_job = (UNIT.c.job_id == job_id) & (TASK.c.kind == TaskKind.CAPTURE)
    query = select(*columns).join(TASK, OF_UNIT).where(of_job).order_by(UNIT.c.unit)
    return [UnitRow(**row) for row in tx.connection.execute(query).mappings()]
