"""Jobs: accepted once a key, read, listed, counted, cancelled and resumed."""

import hashlib
from dataclasses import replace

from sqlalchemy import func, insert, select, update
from sqlalchemy.engine import RowMapping

from schemas.events import Event
from schemas.identity import Identity
from schemas.job import JobState, JobSummary, Progress
from schemas.request import ExtractRequest
from service.errors import IdempotencyConflict, NotFound, RequestError
from service.store import tasks
from service.store.database import Transaction
from service.store.ledger import lock_job, move_job, move_task, progress_of, record, tasks_in
from service.store.stopping import stop
from service.store.tables import EVENT, JOB, REQUEST, TASK
from service.store.values import JobRow, TaskKind, TaskState

JOB_COLUMNS = [JOB.c[name] for name in JobRow.__slots__ if name not in ("request", "progress")]
COUNTERS = [JOB.c[name] for name in Progress.model_fields]
SUMMARY = ("id", "state", "model", "source_kind", "problem", "hub_commit", "created_at", "updated_at")
SUMMARY_COLUMNS = [*(JOB.c[name] for name in SUMMARY), JOB.c.identity, *COUNTERS]


def submit(
    tx: Transaction, job_id: str, idempotency_key: str, request: ExtractRequest
) -> tuple[JobRow, bool]:
    """Insert a job unless its key has one; say whether it is new. Raises IdempotencyConflict."""
    request_sha256 = hashlib.sha256(request.canonical_json().encode()).hexdigest()
    new = tx.insert(JOB).values(
        id=job_id,
        idempotency_key=idempotency_key,
        request_sha256=request_sha256,
        publish_subject=request.hub.repo_id if request.hub else job_id,
        model=request.model,
        source_kind=request.source.kind,
        state=JobState.QUEUED,
        last_event=0,
        created_at=tx.now,
        updated_at=tx.now,
        **Progress().model_dump(),
    )
    if tx.connection.scalar(new.on_conflict_do_nothing().returning(JOB.c.id)):
        tx.connection.execute(insert(REQUEST).values(job_id=job_id, body=request))
        submitted = record(tx, lock_job(tx, job_id), "state", "submitted")
        tasks.add(tx, submitted, TaskKind.PLAN)
        return job(tx, job_id), True
    same = select(JOB.c.id).where(
        JOB.c.idempotency_key == idempotency_key, JOB.c.request_sha256 == request_sha256
    )
    stored = tx.connection.scalar(same)
    if stored is None:
        raise IdempotencyConflict(
            "this idempotency key already stands for a job with another request",
            field="Idempotency-Key",
            cure="repeat the first request unchanged, or send this one under a new key",
        )
    return job(tx, stored), False


def job(tx: Transaction, job_id: str) -> JobRow:
    """Return a job. Raises NotFound."""
    query = select(*JOB_COLUMNS, *COUNTERS, REQUEST.c.body.label("request")).join(REQUEST)
    row = tx.connection.execute(query.where(JOB.c.id == job_id)).mappings().one_or_none()
    if row is None:
        raise NotFound(f"there is no job {job_id}", field="job_id")
    names = [name for name in JobRow.__slots__ if name != "progress"]
    return JobRow(progress=progress_of(row), **{name: row[name] for name in names})


def summary(tx: Transaction, job_id: str) -> JobSummary:
    """Return a job without its request. Raises NotFound."""
    row = tx.connection.execute(select(*SUMMARY_COLUMNS).where(JOB.c.id == job_id)).mappings().one_or_none()
    if row is None:
        raise NotFound(f"there is no job {job_id}", field="job_id")
    return _summary(row)


def page(
    tx: Transaction, *, state: JobState | None = None, cursor: str | None = None, limit: int = 50
) -> tuple[list[JobSummary], str | None]:
    """Return a page of jobs, newest first, and the cursor of the next; no request is read.

    Raises RequestError for an unknown cursor.
    """
    query = select(*SUMMARY_COLUMNS).order_by(JOB.c.number.desc()).limit(limit + 1)
    if state is not None:
        query = query.where(JOB.c.state == state)
    if cursor is not None:
        last = tx.connection.scalar(select(JOB.c.number).where(JOB.c.id == cursor))
        if last is None:
            raise RequestError(
                "the cursor is of no page", field="cursor", cure="begin again without a cursor"
            )
        query = query.where(JOB.c.number < last)
    rows = [_summary(row) for row in tx.connection.execute(query).mappings()]
    return rows[:limit], rows[limit - 1].id if len(rows) > limit else None


def request(tx: Transaction, job_id: str) -> ExtractRequest:
    """Return a job's request, which never changes and so needs no lock."""
    body: ExtractRequest = tx.connection.scalars(
        select(REQUEST.c.body).where(REQUEST.c.job_id == job_id)
    ).one()
    return body


def cancel(tx: Transaction, job_id: str) -> JobRow:
    """Stop a job for good or until it is resumed; a cancelled one stays as it is.

    Raises NotFound, IllegalMove.
    """
    locked = lock_job(tx, job_id)
    if locked.state is not JobState.CANCELLED:
        stop(tx, locked, JobState.CANCELLED)
    return job(tx, job_id)


def resume(tx: Transaction, job_id: str) -> JobRow:
    """Queue a stopped job with all it has; failed units and counted deaths start afresh.

    Raises NotFound, IllegalMove.
    """
    locked = move_job(tx, lock_job(tx, job_id), JobState.QUEUED)
    for task in tasks_in(tx, locked, TaskState.FAILED):
        units_failed = -int(task.kind is TaskKind.CAPTURE)
        fresh = replace(task, state=TaskState.PENDING)
        locked = move_task(tx, locked, task, fresh, units_failed=units_failed)
    waiting = update(TASK).where(TASK.c.job_id == job_id, TASK.c.state == TaskState.PENDING)
    tx.connection.execute(waiting.values(attempts=0, deaths=0, not_before=None))
    return job(tx, job_id)


def counts(tx: Transaction) -> dict[JobState, int]:
    """Return the number of jobs in every state."""
    found = tx.connection.execute(select(JOB.c.state, func.count()).group_by(JOB.c.state))
    return dict.fromkeys(JobState, 0) | {state: number for state, number in found}


def state(tx: Transaction, job_id: str) -> JobState:
    """Return a job's state. Raises NotFound."""
    found: JobState | None = tx.connection.scalar(select(JOB.c.state).where(JOB.c.id == job_id))
    if found is None:
        raise NotFound(f"there is no job {job_id}", field="job_id")
    return found


def totals(tx: Transaction) -> Progress:
    """Return the counters of all jobs together; `plan_done` is false."""
    names = [name for name in Progress.model_fields if name != "plan_done"]
    columns = [func.coalesce(func.sum(JOB.c[name]), 0).label(name) for name in names]
    sums = tx.connection.execute(select(*columns))
    return Progress.model_validate(dict(sums.mappings().one()))


def events(tx: Transaction, job_id: str, *, after: int = 0, limit: int = 500) -> list[Event]:
    """Return events numbered above `after`, in order; none that comes later gets a lower number."""
    query = select(EVENT.c.entry).where(EVENT.c.job_id == job_id, EVENT.c.id > after)
    return list(tx.connection.scalars(query.order_by(EVENT.c.id).limit(limit)))


def _summary(row: RowMapping) -> JobSummary:
    identity: Identity | None = row["identity"]
    values = {name: row[name] for name in SUMMARY}
    return JobSummary(
        progress=progress_of(row), identity_sha256=identity.sha256() if identity else None, **values
    )
