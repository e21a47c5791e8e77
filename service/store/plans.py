"""Planning: one planner a job fixes its identity and adds its units, each with the rejects beside it."""

from collections.abc import Sequence
from dataclasses import replace

from sqlalchemy import insert, or_, select

from schemas.identity import Identity
from schemas.job import JobState, Problem, RejectView, UnitState
from schemas.request import ExtractRequest
from service.errors import IdentityChanged, Outcome, QuarryError, SourceRefused
from service.store import roles
from service.store.database import Transaction
from service.store.ledger import count, lock_job, move_job, record
from service.store.roles import Role
from service.store.stopping import stop
from service.store.tables import JOB, REJECT, UNIT
from service.store.values import PlanLease, PlannedUnit

SILENT_DEATHS = 20
"""Planners that may vanish over one job, killed or crashed, before it waits for a person."""


def next_job(tx: Transaction) -> str | None:
    """Return the oldest job that waits for a planner, or to be let on with a plan that is done."""
    unplanned = (JOB.c.state == JobState.RUNNING) & ~JOB.c.plan_done & ~roles.live(tx, Role.PLAN, JOB.c.id)
    query = select(JOB.c.id).where(or_(JOB.c.state == JobState.QUEUED, unplanned)).order_by(JOB.c.number)
    return tx.connection.scalar(query.limit(1))


def lease(
    tx: Transaction, job_id: str, request: ExtractRequest, owner: str, ttl_s: float
) -> PlanLease | None:
    """Set a job running and lease its planning; none if there is nothing to plan or another was faster."""
    job = lock_job(tx, job_id)
    if job.state is JobState.QUEUED:
        job = move_job(tx, job, JobState.RUNNING)
    if job.state is not JobState.RUNNING or job.progress.plan_done:
        return None
    taken = roles.take(tx, Role.PLAN, job_id, job_id, owner, ttl_s)
    if taken is None:
        return None
    if taken.silent_deaths >= SILENT_DEATHS:
        problem = QuarryError(
            f"planning ended {taken.silent_deaths} times without a result",
            cure="look for the reason in the planner's log and the kernel's (memory), then resume",
        ).problem()
        stop(tx, job, JobState.BLOCKED, problem)
        return None
    planned = select(UNIT.c.plan_sha256).where(UNIT.c.job_id == job_id).order_by(UNIT.c.unit)
    return PlanLease(job_id, taken.epoch, owner, request, job.identity, tuple(tx.connection.scalars(planned)))


def fail(tx: Transaction, lease: PlanLease, problem: Problem, outcome: Outcome, max_failures: int) -> None:
    """End a try at planning with a problem: fail the job, block it, or try again. Raises LeaseLost."""
    job = roles.held(tx, lease)
    failures = roles.let_go(tx, lease, failures=int(outcome is not Outcome.VOID))
    if outcome is Outcome.FAIL:
        stop(tx, job, JobState.FAILED, problem)
    elif outcome is Outcome.BLOCK or failures >= max_failures:
        stop(tx, job, JobState.BLOCKED, problem)


def set_identity(tx: Transaction, lease: PlanLease, identity: Identity) -> None:
    """Fix what the dataset is. Raises IdentityChanged if it is fixed otherwise, LeaseLost."""
    job = roles.held(tx, lease)
    if job.identity is None:
        record(tx, replace(job, identity=identity), "progress", "identity fixed")
    elif job.identity != identity:
        changed = ", ".join(_differences(job.identity, identity))
        raise IdentityChanged(
            f"job {job.id} would no longer be the same dataset: {changed} changed",
            cure="restore what changed and resume, or submit a new job",
        )


def add_unit(tx: Transaction, lease: PlanLease, unit: PlannedUnit, rejects: Sequence[RejectView]) -> None:
    """Add a unit and the rejects planned with it; the same unit again changes nothing.

    Raises IdentityChanged, LeaseLost.
    """
    job = roles.held(tx, lease)
    job.known_identity  # noqa: B018 - raises
    stored = select(UNIT.c.plan_sha256).where(UNIT.c.job_id == job.id, UNIT.c.unit == unit.unit)
    plan_sha256 = tx.connection.scalar(stored)
    if plan_sha256 == unit.plan_sha256:
        return
    if plan_sha256 is not None:
        raise IdentityChanged(
            f"unit {unit.unit} of job {job.id} was planned with other samples",
            field="source",
            cure="restore the source, QUARRY_UNIT_MAX_SAMPLES and the installed versions and resume,"
            " or submit a new job",
        )
    new = insert(UNIT).values(
        job_id=job.id,
        unit=unit.unit,
        state=UnitState.PENDING,
        epoch=0,
        attempts=0,
        num_samples=unit.num_samples,
        num_tokens=unit.num_tokens,
        plan_sha256=unit.plan_sha256,
    )
    tx.connection.execute(new)
    progress = count(
        job.progress,
        units_planned=1,
        samples_planned=unit.num_samples + len(rejects),
        samples_rejected=len(rejects),
        tokens_planned=unit.num_tokens,
    )
    add_rejects(tx, job.id, None, rejects)
    record(tx, replace(job, progress=progress), "progress", f"unit {unit.unit} planned")


def finish(tx: Transaction, lease: PlanLease, rejects: Sequence[RejectView]) -> None:
    """Close the plan with the rejects after its last unit. Raises LeaseLost, SourceRefused if it is empty."""
    job = roles.held(tx, lease)
    job.known_identity  # noqa: B018 - raises
    progress = count(job.progress, samples_planned=len(rejects), samples_rejected=len(rejects))
    if not progress.samples_planned:
        raise SourceRefused(
            "the source holds no samples", field="source", cure="name a source with at least one row"
        )
    add_rejects(tx, job.id, None, rejects)
    record(
        tx, replace(job, progress=progress.model_copy(update={"plan_done": True})), "progress", "plan done"
    )
    roles.give_back(tx, job.id)


def add_rejects(tx: Transaction, job_id: str, unit: int | None, rejects: Sequence[RejectView]) -> None:
    """Insert rejects of a unit, or of the plan where `unit` is null."""
    rows = [{"job_id": job_id, "position": entry.position, "unit": unit, "entry": entry} for entry in rejects]
    if rows:
        tx.connection.execute(insert(REJECT), rows)


def _differences(stored: Identity, given: Identity) -> list[str]:
    return [name for name in Identity.model_fields if getattr(stored, name) != getattr(given, name)]
