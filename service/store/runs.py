"""The outcomes of a schedule's slots: one row per slot; old rows are deleted."""

from datetime import datetime, timedelta
from typing import Any

from pydantic import ValidationError
from sqlalchemy import and_, delete, exists, func, or_, select, update
from sqlalchemy.engine import RowMapping

from schemas.job import JobState, Problem
from schemas.schedule import RunOutcome, RunView, ScheduleRules
from service.store.database import Transaction
from service.store.job_rows import rows_of
from service.store.migration import check_write
from service.store.schedule_tables import CAPTURED_SAMPLES, RUN, SCHEDULE
from service.store.tables import JOB

LATE = timedelta(minutes=5)
"""A slot that was not processed within this time counts as missed."""
RUNS_KEPT = 1000
JOB_STATE = func.coalesce(RUN.c.job_state, JOB.c.state).label("job_state")
"""The state of a run's job, which may be deleted by now."""


def record(
    tx: Transaction,
    schedule: int,
    slot: datetime,
    outcome: RunOutcome,
    detail: str | None = None,
    job_id: str | None = None,
) -> None:
    """Record the outcome of a slot; only the first, if the clock was set back or the times were changed.

    The schedule must be locked.
    """
    values = {"slot": slot, "outcome": outcome, "at": tx.now, "detail": detail, "job_id": job_id}
    tx.connection.execute(tx.insert(RUN).values(schedule=schedule, **values).on_conflict_do_nothing())
    _forget_old(tx, schedule)


def note(tx: Transaction, job_id: str, detail: str, outcome: RunOutcome | None = None) -> None:
    """Set the detail of a job's run in its schedule, and the outcome if one is given."""
    check_write(tx)
    values = {"detail": detail} | ({} if outcome is None else {"outcome": outcome})
    tx.connection.execute(update(RUN).where(RUN.c.job_id == job_id).values(values))


def is_failing(tx: Transaction, row: RowMapping) -> bool:
    """Say whether a schedule's last slot ended badly; if it was skipped, the job that was going on.

    A slot that nobody decided until the next one came is missed, also before a worker records it.
    """
    slot = row["next_slot"]
    is_due = slot is not None and slot <= tx.now and not row["paused"] and row["waiting_slot"] is None
    if is_due:
        query = select(SCHEDULE.c.rules).where(SCHEDULE.c.number == row["number"])
        try:
            rules: ScheduleRules = tx.connection.execute(query).scalar_one()
        except ValidationError:
            return True  # nobody can decide it; the row may be damaged, or of a later version
        following = rules.first_after(slot)
        if following is not None and following <= tx.now:
            return True
    bad = {JobState.FAILED, JobState.BLOCKED, JobState.CANCELLED}
    # Without the problem of the job, which may be damaged, too.
    runs = select(RUN.c.outcome, RUN.c.job_id, JOB_STATE).outerjoin(JOB, JOB.c.id == RUN.c.job_id)
    newest = runs.where(RUN.c.schedule == row["number"]).order_by(RUN.c.slot.desc()).limit(1)
    last = tx.connection.execute(newest).one_or_none()
    if last is not None and last.outcome is RunOutcome.SKIPPED:
        last = tx.connection.execute(newest.where(RUN.c.job_id.is_not(None))).one_or_none()
    return last is not None and (last.job_id is None or last.job_state in bad)


def page(
    tx: Transaction,
    schedule: int,
    *,
    before: datetime | None = None,
    limit: int,
) -> list[RunView]:
    """Return a schedule's slots before `before`, newest first."""
    of_run = RUN.c.slot, RUN.c.outcome, RUN.c.at, RUN.c.detail, RUN.c.job_id, JOB_STATE
    query = select(*of_run, JOB.c.samples_written, JOB.c.samples_rejected, JOB.c.problem).outerjoin(
        JOB, JOB.c.id == RUN.c.job_id
    )
    query = query.where(RUN.c.schedule == schedule).order_by(RUN.c.slot.desc()).limit(limit)
    if before is not None:
        query = query.where(RUN.c.slot < before)
    return [_view(dict(row._mapping)) for row in rows_of(tx, query, RUN.c.job_id)]


def _view(row: dict[str, Any]) -> RunView:
    problem: Problem | None = row.pop("problem")
    if problem is not None and row["job_state"] is not JobState.COMPLETED:
        row["detail"] = row["detail"] or problem.detail
    return RunView(**row)


def last_good_at(tx: Transaction, schedule: int) -> datetime | None:
    """Return when a job of a schedule was last completed with all its samples; it may be deleted by now."""
    ended_at = func.coalesce(RUN.c.job_ended_at, JOB.c.updated_at, type_=RUN.c.at.type)
    completed = func.coalesce(RUN.c.job_state, JOB.c.state) == JobState.COMPLETED.value
    query = select(ended_at).outerjoin(JOB, JOB.c.id == RUN.c.job_id)
    whole = RUN.c.outcome == RunOutcome.SUBMITTED
    query = query.where(RUN.c.schedule == schedule, completed, whole).order_by(RUN.c.slot.desc()).limit(1)
    last: datetime | None = tx.connection.scalar(query)
    return last


def _forget_old(tx: Transaction, schedule: int) -> None:
    """Delete runs older than the newest `RUNS_KEPT`.

    Keeps those whose job or captured samples still exist, and the last good one.
    """
    mine = RUN.c.schedule == schedule
    newest = select(RUN.c.slot).where(mine).order_by(RUN.c.slot.desc()).offset(RUNS_KEPT).limit(1)
    good = select(func.max(RUN.c.slot)).where(mine, RUN.c.job_state == JobState.COMPLETED)
    wrote = exists().where(CAPTURED_SAMPLES.c.schedule == schedule, CAPTURED_SAMPLES.c.job_id == RUN.c.job_id)
    job_is_gone = or_(RUN.c.job_id.is_(None), RUN.c.job_state.is_not(None))
    idle = and_(job_is_gone, ~wrote, RUN.c.slot.is_distinct_from(good.scalar_subquery()))
    tx.connection.execute(delete(RUN).where(mine, RUN.c.slot <= newest.scalar_subquery(), idle))
