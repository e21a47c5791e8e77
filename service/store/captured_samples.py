"""Which samples a schedule's runs have captured, by their hashes, and what a stopped job leaves behind.

A commit holds its job's lock and must not wait for the schedule's, which others hold while they lock a job.
So no statement here locks a schedule, and there is no foreign key that would.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sqlalchemy import and_, delete, exists, func, select

from schemas.identity import Identity
from schemas.job import STOPPED_JOB_STATES
from schemas.schedule import RunOutcome, ScheduleRules
from service.errors import NotFound
from service.store import jobs, runs, storing, totals
from service.store.database import Transaction
from service.store.schedule_rows import row_of
from service.store.schedule_tables import CAPTURED_SAMPLES, RUN, SCHEDULE
from service.store.tables import JOB, SHARD, TASK, UNIT, UNIT_COMMIT
from service.store.transitions import LockedJob, count, lock_job, record
from service.store.values import TaskKind, TaskState


@dataclass(frozen=True, slots=True)
class Earlier:
    """A schedule's other runs: `last` is the latest job that has written, `identity` its dataset's identity.

    `jobs` have written with the given recipe. `last` and `identity` are None if no run has written.
    """

    rules: ScheduleRules
    last: str | None
    identity: Identity | None
    jobs: tuple[str, ...]


def earlier(tx: Transaction, schedule: int, job_id: str, recipe: str) -> Earlier | None:
    """Return the runs of a schedule other than `job_id`, or None if the schedule was deleted.

    Raises QuarryError if its rules cannot be read.
    """
    try:
        rules = row_of(tx, select(SCHEDULE.c.rules), schedule)["rules"]
    except NotFound:
        return None
    identity = func.coalesce(RUN.c.identity, JOB.c.identity, type_=RUN.c.identity.type).label("identity")
    wrote = exists().where(CAPTURED_SAMPLES.c.schedule == schedule, CAPTURED_SAMPLES.c.job_id == RUN.c.job_id)
    others = select(RUN.c.job_id, identity).outerjoin(JOB, JOB.c.id == RUN.c.job_id)
    others = others.where(RUN.c.schedule == schedule, RUN.c.job_id != job_id, wrote)
    newest = tx.connection.execute(others.order_by(RUN.c.slot.desc()).limit(1)).one_or_none()
    last, wrote_as = newest or (None, None)
    of_recipe = and_(CAPTURED_SAMPLES.c.schedule == schedule, CAPTURED_SAMPLES.c.recipe == recipe)
    same = select(CAPTURED_SAMPLES.c.job_id).where(of_recipe, CAPTURED_SAMPLES.c.job_id != job_id).distinct()
    job_ids = tuple(tx.connection.scalars(same.order_by(CAPTURED_SAMPLES.c.job_id)))
    return Earlier(rules, last, wrote_as, job_ids)


def first_recipe(tx: Transaction, job_id: str) -> str | None:
    """Return the recipe with which a job's schedule first wrote, or None without a schedule."""
    of_job = select(JOB.c.schedule).where(JOB.c.id == job_id).scalar_subquery()
    same = and_(CAPTURED_SAMPLES.c.schedule == RUN.c.schedule, CAPTURED_SAMPLES.c.job_id == RUN.c.job_id)
    recipes = select(CAPTURED_SAMPLES.c.recipe).select_from(RUN).join(CAPTURED_SAMPLES, same)
    first = recipes.where(RUN.c.schedule == of_job).order_by(RUN.c.slot).limit(1)
    recipe: str | None = tx.connection.scalar(first)
    return recipe


def hashes(tx: Transaction, schedule: int, recipe: str, job_id: str) -> bytes:
    """Return the concatenated hashes of the samples that a job has written."""
    mine = and_(
        CAPTURED_SAMPLES.c.schedule == schedule,
        CAPTURED_SAMPLES.c.recipe == recipe,
        CAPTURED_SAMPLES.c.job_id == job_id,
    )
    return b"".join(tx.connection.scalars(select(CAPTURED_SAMPLES.c.content_hashes).where(mine)))


def add(tx: Transaction, job: LockedJob, unit: int, made: bytes) -> None:
    """Record the samples of a unit committed in this transaction, if its schedule still exists."""
    is_there = select(exists().where(SCHEDULE.c.number == job.schedule))
    if made and tx.connection.scalar(is_there):
        new = tx.insert(CAPTURED_SAMPLES).values(
            schedule=job.schedule,
            recipe=job.known_identity.recipe_sha256(),
            job_id=job.id,
            unit=unit,
            content_hashes=made,
        )
        # The row exists if the unit was lost with its host; it includes the samples rejected then.
        tx.connection.execute(new.on_conflict_do_nothing())


def lock_stopped(tx: Transaction, schedule: int) -> list[LockedJob]:
    """Lock the schedule's jobs that failed or were cancelled after writing something."""
    has_shards = exists().where(SHARD.c.job_id == JOB.c.id)
    stopped = and_(JOB.c.schedule == schedule, JOB.c.state.in_(STOPPED_JOB_STATES), has_shards)
    in_order = select(JOB.c.id).where(stopped).order_by(JOB.c.number).with_for_update()
    return [lock_job(tx, job_id) for job_id in tx.connection.scalars(in_order).all()]


def publish(tx: Transaction, schedule: int, stopped: Sequence[LockedJob]) -> None:
    """Let the jobs from `lock_stopped` finish with what they have written.

    The samples that they wrote are recorded and will not be captured again. The next run captures the others,
    as well as those of units that stopped jobs lost with a host and did not capture again.
    """
    of_jobs = select(JOB.c.id).where(JOB.c.schedule == schedule, JOB.c.state.in_(STOPPED_JOB_STATES))
    of_unit = UNIT_COMMIT.c.job_id == CAPTURED_SAMPLES.c.job_id, UNIT_COMMIT.c.unit == CAPTURED_SAMPLES.c.unit
    lost = CAPTURED_SAMPLES.c.job_id.in_(of_jobs), ~exists().where(*of_unit)
    tx.connection.execute(delete(CAPTURED_SAMPLES).where(CAPTURED_SAMPLES.c.schedule == schedule, *lost))
    for job in stopped:
        jobs.queue_again(tx, job if job.progress.is_captured else _without_rest(tx, job))


def _without_rest(tx: Transaction, job: LockedJob) -> LockedJob:
    """Drop a stopped job's remaining planning and its uncaptured units; return the updated job."""
    work = TASK.c.kind.in_((TaskKind.PLAN, TaskKind.CAPTURE))
    undone = and_(TASK.c.job_id == job.id, work, TASK.c.state != TaskState.DONE)
    of_task = select(TASK.c.item).where(undone, TASK.c.kind == TaskKind.CAPTURE)
    rest = and_(UNIT.c.job_id == job.id, UNIT.c.unit.in_(of_task))
    sums = select(func.count(), func.sum(UNIT.c.num_samples), func.sum(UNIT.c.num_tokens)).where(rest)
    units, samples, tokens = (int(value or 0) for value in tx.connection.execute(sums).one())
    tx.connection.execute(delete(UNIT).where(rest))
    tx.connection.execute(delete(TASK).where(undone))
    dropped = {"units_planned": units, "samples_planned": samples, "tokens_planned": tokens}
    dropped["units_failed"] = job.progress.units_failed
    totals.keep(tx, dropped)
    left = count(
        job.progress,
        samples_given_up=samples,
        **{name: -number for name, number in dropped.items()},
    )
    detail = f"ended with what it had written; {samples} planned samples are left to the next run"
    job = replace(job, progress=left.model_copy(update={"plan_done": True}))
    job = record(tx, job, "progress", detail)
    storing.end_when_captured(tx, job)
    runs.note(tx, job.id, detail, RunOutcome.CUT_SHORT)
    return job
