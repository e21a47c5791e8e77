"""What became of a schedule's slots: one row a slot, and counts that go on when old rows are deleted."""

from datetime import datetime, timedelta

from sqlalchemy import and_, delete, exists, func, or_, select, update

from schemas.job import JobState
from schemas.schedule import RunOutcome, RunView
from service.store.database import Transaction
from service.store.schedule_tables import CAPTURED_SAMPLES, RUN, SCHEDULE, SLOT_COUNTS
from service.store.tables import JOB

LATE = timedelta(minutes=5)
"""A slot that nobody has looked at for so long was missed."""
RUNS_KEPT = 1000


def record(
    tx: Transaction,
    schedule: int,
    slot: datetime,
    outcome: RunOutcome,
    detail: str | None = None,
    job_id: str | None = None,
) -> None:
    """Write down what became of a slot; where a clock was set back and the times were changed, only once.

    The schedule is locked.
    """
    values = {"slot": slot, "outcome": outcome, "at": tx.now, "detail": detail, "job_id": job_id}
    new = tx.insert(RUN).values(schedule=schedule, **values).on_conflict_do_nothing()
    if tx.connection.scalar(new.returning(RUN.c.schedule)) is not None:
        is_late = outcome is RunOutcome.SUBMITTED and tx.now - slot > LATE
        _count(tx, schedule, outcome.value, *(["late"] if is_late else []))
        _forget_old(tx, schedule)


def cut_short(tx: Transaction, schedule: int, job_id: str, detail: str) -> None:
    """Note that a job was ended before it had taken all of its samples. The schedule is locked."""
    values = {"outcome": RunOutcome.CUT_SHORT, "detail": detail}
    tx.connection.execute(update(RUN).where(RUN.c.job_id == job_id).values(values))
    _count(tx, schedule, RunOutcome.CUT_SHORT.value)


def page(tx: Transaction, schedule: int, *, before: datetime | None = None, limit: int) -> list[RunView]:
    """Return a schedule's slots before `before`, newest first."""
    job_state = func.coalesce(RUN.c.job_state, JOB.c.state).label("job_state")
    columns = RUN.c.slot, RUN.c.outcome, RUN.c.at, RUN.c.detail, RUN.c.job_id, job_state
    query = select(*columns).outerjoin(JOB, JOB.c.id == RUN.c.job_id)
    query = query.where(RUN.c.schedule == schedule).order_by(RUN.c.slot.desc()).limit(limit)
    if before is not None:
        query = query.where(RUN.c.slot < before)
    return [RunView(**row) for row in tx.connection.execute(query).mappings()]


def last_good_at(tx: Transaction, schedule: int) -> datetime | None:
    """Return when a job of a schedule was last completed; the job may be deleted by now."""
    ended_at = func.coalesce(RUN.c.job_ended_at, JOB.c.updated_at, type_=RUN.c.at.type)
    completed = func.coalesce(RUN.c.job_state, JOB.c.state) == JobState.COMPLETED.value
    query = select(ended_at).outerjoin(JOB, JOB.c.id == RUN.c.job_id)
    whole = RUN.c.outcome == RunOutcome.SUBMITTED
    query = query.where(RUN.c.schedule == schedule, completed, whole).order_by(RUN.c.slot.desc()).limit(1)
    last: datetime | None = tx.connection.scalar(query)
    return last


def counts(tx: Transaction) -> dict[str, dict[str, int]]:
    """Return how many slots of each schedule had each outcome, and how many jobs were made `late`.

    A slot that was cut short was submitted before, and counts as both.
    """
    query = select(SCHEDULE.c.name, *(SCHEDULE.c[column].label(name) for name, column in SLOT_COUNTS.items()))
    rows = tx.connection.execute(query.order_by(SCHEDULE.c.name)).mappings()
    return {row["name"]: {name: row[name] for name in SLOT_COUNTS} for row in rows}


def _count(tx: Transaction, schedule: int, *names: str) -> None:
    columns = [SCHEDULE.c[SLOT_COUNTS[name]] for name in names]
    more = update(SCHEDULE).where(SCHEDULE.c.number == schedule)
    tx.connection.execute(more.values({column: column + 1 for column in columns}))


def _forget_old(tx: Transaction, schedule: int) -> None:
    """Delete runs beyond the newest, but for those whose job or keys are there, and the last good one."""
    mine = RUN.c.schedule == schedule
    newest = select(RUN.c.slot).where(mine).order_by(RUN.c.slot.desc()).offset(RUNS_KEPT).limit(1)
    good = select(func.max(RUN.c.slot)).where(mine, RUN.c.job_state == JobState.COMPLETED)
    wrote = exists().where(CAPTURED_SAMPLES.c.schedule == schedule, CAPTURED_SAMPLES.c.job_id == RUN.c.job_id)
    job_is_gone = or_(RUN.c.job_id.is_(None), RUN.c.job_state.is_not(None))
    idle = and_(job_is_gone, ~wrote, RUN.c.slot.is_distinct_from(good.scalar_subquery()))
    tx.connection.execute(delete(RUN).where(mine, RUN.c.slot <= newest.scalar_subquery(), idle))
