"""Planning: one planner per job fixes its identity and adds its units with the rejects planned with each."""

import hashlib
from collections.abc import Sequence
from dataclasses import replace

from sqlalchemy import and_, insert, or_, select, update

from schemas.identity import Identity
from schemas.job import RejectView
from service.errors import IdentityChanged, SourceRefused
from service.store import keys, runs, storing, tasks
from service.store.database import Store, Transaction
from service.store.tables import JOB, REJECT, TASK, UNIT, UNIT_PLAN
from service.store.task_choice import Choice
from service.store.transitions import LockedJob, add_task, count, record
from service.store.values import Lease, PlanLease, PlannedUnit, TaskKind, TaskState

AHEAD_UNITS = 64
"""How many units may wait for capture when the next pass over a source is planned: their plans are in the
database.
"""


def lease(store: Store, owner: str, ttl_s: float, *, outranking: str | None = None) -> PlanLease | None:
    """Lease the planning of the oldest job of the highest priority that has no planner.

    With `outranking`, the id of a job, the priority must be higher than that job's.
    """
    return tasks.lease(store, TaskKind.PLAN, _grant, owner, ttl_s, Choice(outranking=outranking))


def _grant(tx: Transaction, job: LockedJob, lease: Lease) -> PlanLease:
    places = select(JOB.c.pass_unit, JOB.c.pass_position).where(JOB.c.id == job.id)
    first_unit, first_position = tx.connection.execute(places).one()
    return PlanLease(
        **lease.fields(),
        identity=job.identity,
        schedule=job.schedule,
        spool=job.spool,
        grants=keys.granted(tx, job.owner),
        first_unit=first_unit,
        first_position=first_position,
    )


def set_identity(tx: Transaction, lease: PlanLease, identity: Identity) -> None:
    """Fix the dataset's identity, before its first unit.

    Raises IdentityChanged if a different one is already fixed, LeaseLost.
    """
    job, _ = tasks.held(tx, lease)
    if job.identity is None:
        record(tx, replace(job, identity=identity), "progress", "identity fixed")
        digest = identity.model_sha256()
        tx.connection.execute(update(JOB).where(JOB.c.id == job.id).values(model_sha256=digest))
    elif job.identity != identity:
        changed = ", ".join(job.identity.differences(identity))
        raise IdentityChanged(
            f"job {job.id} would no longer be the same dataset: {changed} changed",
            cure="restore what changed and resume, or submit a new job",
        )


def add_unit(
    tx: Transaction, lease: PlanLease, unit: PlannedUnit, rejects: Sequence[RejectView], known: int = 0
) -> None:
    """Add a unit and the rejects planned with it; adding the same unit again changes nothing.

    `known` counts the samples skipped on the way because an earlier run has written them.

    Raises IdentityChanged if it was planned with other samples, QuotaExceeded, LeaseLost.
    """
    job, task = tasks.held(tx, lease)
    job.known_identity  # noqa: B018 - raises
    place, plan_sha256 = {"job_id": job.id, "unit": unit.unit}, hashlib.sha256(unit.plan).hexdigest()
    query = select(UNIT.c.plan_sha256).where(UNIT.c.job_id == job.id, UNIT.c.unit == unit.unit)
    stored = tx.connection.scalar(query)
    if stored == plan_sha256:
        return
    if stored is not None:
        raise _planned_differently(f"unit {unit.unit} of job {job.id} was planned with other samples")
    counts = {"num_samples": unit.num_samples, "num_tokens": unit.num_tokens}
    tx.connection.execute(insert(UNIT).values(**place, **counts, plan_sha256=plan_sha256))
    tx.connection.execute(insert(UNIT_PLAN).values(**place, content=unit.plan, sha256=plan_sha256))
    add_task(tx, job, TaskKind.CAPTURE, unit.unit)
    tasks.forgive(tx, task)
    progress = count(
        job.progress,
        units_planned=1,
        samples_planned=unit.num_samples + len(rejects),
        samples_rejected=len(rejects),
        samples_known=known,
        tokens_planned=unit.num_tokens,
    )
    _add_planned(tx, job, rejects)
    record(tx, replace(job, progress=progress), "progress", f"unit {unit.unit} planned")


def add_rejected(tx: Transaction, lease: PlanLease, rejects: Sequence[RejectView], known: int) -> None:
    """Add rejects that no unit is planned with; adding the same again changes nothing.

    Raises IdentityChanged if others were planned, QuotaExceeded, LeaseLost.
    """
    job, task = tasks.held(tx, lease)
    places = [(reject.position, reject.turn) for reject in rejects]
    if _planned_since(tx, job.id, rejects) == places:
        return
    tasks.forgive(tx, task)
    num = len(rejects)
    progress = count(job.progress, samples_planned=num, samples_rejected=num, samples_known=known)
    _add_planned(tx, job, rejects)
    record(tx, replace(job, progress=progress), "progress", f"{num} rows rejected")


def _add_planned(tx: Transaction, job: LockedJob, rejects: Sequence[RejectView]) -> None:
    """Add rejects that follow all those of the plan so far.

    Raises IdentityChanged if they do not; QuotaExceeded if the job's owner had already used all bytes.
    """
    if _planned_since(tx, job.id, rejects):
        raise _planned_differently(f"rows of job {job.id} were rejected between other units")
    if rejects:  # each pass of a job that reads its source forever adds them again
        keys.check_bytes(tx, job.owner)
    add_rejects(tx, job.id, None, rejects)


def _planned_since(tx: Transaction, job_id: str, rejects: Sequence[RejectView]) -> list[tuple[int, int]]:
    """Return position and turn of as many of the plan's rejects, beginning where `rejects` do."""
    if not rejects:
        return []
    position, turn = REJECT.c.position, REJECT.c.turn
    begin = rejects[0]
    behind = or_(position > begin.position, and_(position == begin.position, turn >= begin.turn))
    # `position >=` by itself: both databases find the first one by it in the primary key.
    of_plan = REJECT.c.job_id == job_id, REJECT.c.unit.is_(None), position >= begin.position, behind
    query = select(position, turn).where(*of_plan).order_by(position, turn).limit(len(rejects))
    return [(row.position, row.turn) for row in tx.connection.execute(query)]


def _planned_differently(what: str) -> IdentityChanged:
    return IdentityChanged(
        what,
        field="source",
        cure="restore the source, QUARRY_UNIT_MAX_SAMPLES and the installed versions and resume,"
        " or submit a new job",
    )


def finish(
    tx: Transaction,
    lease: PlanLease,
    rejects: Sequence[RejectView],
    known: int = 0,
    *,
    is_last: bool = True,
) -> None:
    """Close the plan with the rejects and known samples after its last unit, and end the lease.

    If the pass is not the last and has added a unit, another pass follows.

    Raises SourceRefused if the plan is empty, unless it is for new or posted samples or for a part;
    QuotaExceeded, LeaseLost.
    """
    job, task = tasks.held(tx, lease)
    may_be_empty = job.known_identity.part or job.schedule or job.spool
    progress = count(
        job.progress, samples_planned=len(rejects), samples_rejected=len(rejects), samples_known=known
    )
    if not (progress.samples_planned or progress.samples_known or may_be_empty):
        raise SourceRefused(
            "the source holds no samples", field="source", cure="name a source with at least one row"
        )
    if not progress.units_planned and progress.wrote_nothing_new:
        runs.note(tx, job.id, "no new samples")
    _add_planned(tx, job, rejects)
    is_done = is_last or progress.units_planned == lease.first_unit
    progress = progress.model_copy(update={"plan_done": is_done})
    captured_at = job.captured_at if progress.units_planned else tx.now
    planned = replace(job, progress=progress, captured_at=captured_at)
    message = "plan done" if is_done else f"pass {lease.item + 1} planned"
    job = record(tx, tasks.done(tx, planned, task), "progress", message)
    add_pass(tx, job)
    storing.end_when_captured(tx, job)


def add_pass(tx: Transaction, job: LockedJob) -> None:
    """Queue the next pass over a locked job's source, once few units of the previous pass are waiting."""
    progress = job.progress
    if progress.plan_done or progress.units_planned - progress.units_done > AHEAD_UNITS:
        return
    of_plan = TASK.c.job_id == job.id, TASK.c.kind == TaskKind.PLAN
    query = select(TASK.c.item, TASK.c.state).where(*of_plan).order_by(TASK.c.item.desc()).limit(1)
    last = tx.connection.execute(query).one()
    if last.state is not TaskState.DONE:
        return
    part = job.known_identity.part
    rows = progress.samples_planned + progress.samples_known
    place = {"pass_unit": progress.units_planned, "pass_position": rows * (part.of if part else 1)}
    tx.connection.execute(update(JOB).where(JOB.c.id == job.id).values(place))
    add_task(tx, job, TaskKind.PLAN, last.item + 1)


def add_rejects(tx: Transaction, job_id: str, unit: int | None, rejects: Sequence[RejectView]) -> None:
    """Insert rejects of a unit, or of the plan if `unit` is None."""
    whose = {"job_id": job_id, "unit": unit}
    rows = [whose | {"position": entry.position, "turn": entry.turn, "entry": entry} for entry in rejects]
    if rows:
        tx.connection.execute(insert(REJECT), rows)
