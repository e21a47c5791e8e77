"""Jobs: accepted once per idempotency key, read, listed, counted, cancelled and resumed."""

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic import ValidationError
from sqlalchemy import ColumnElement, Select, and_, delete, func, insert, literal, null, select, update
from sqlalchemy.engine import RowMapping

from schemas.events import Event
from schemas.job import ENDED_JOB_STATES, STOPPED_JOB_STATES, JobState, Problem, Progress
from schemas.names import job_id_from_content
from schemas.request import ExtractRequest
from service.errors import IdempotencyConflict, IllegalMove, NotFound, QuarryError, RequestError
from service.store import consumers, keys, totals, workers
from service.store.database import Transaction
from service.store.deletion import TOMBSTONE
from service.store.job_rows import DOCUMENTS, rows_of
from service.store.policies import POLICIES
from service.store.schedule_tables import SCHEDULE
from service.store.stopping import cancel_unread, stop
from service.store.tables import EVENT, JOB, REQUEST, SUBMISSION, TASK
from service.store.transitions import (
    LockedJob,
    add_task,
    lock_job,
    move_job,
    move_task,
    progress_of,
    record,
    tasks_in,
)
from service.store.values import JobRow, LoneDeaths, NewJob, TaskKind, TaskState

CURSOR = re.compile("[0-9]{1,18}")
"""The number of the last job on the previous page, which may have been deleted meanwhile."""
MADE = ("progress", "repository", "waits")
"""Fields of `JobRow` that are not columns of `job`."""
STARTS = "an engine that starts and loads the model"
"""What a job waits for if its units are held only by workers that have no engine yet."""
RECENT_EVENTS = 20
TO_CAPTURE = POLICIES[TaskKind.CAPTURE].job_states


def new_id() -> str:
    """Return an id for a new submission; ids are never reused."""
    return job_id_from_content(secrets.token_hex(16))


def submitted(tx: Transaction, made: NewJob) -> JobRow | None:
    """Return the job that the owner's key names, or None if the key is free.

    Raises IdempotencyConflict if it names a job with another request, or a deleted one.
    """
    of_key = select(SUBMISSION.c.job_id, SUBMISSION.c.deleted_at, JOB).where(_of_key(made))
    with_job = of_key.outerjoin(JOB, JOB.c.id == SUBMISSION.c.job_id)
    row = next((row._mapping for row in rows_of(tx, with_job, SUBMISSION.c.job_id)), None)
    if row is None or (row["deleted_at"] is not None and row["deleted_at"] <= tx.now - TOMBSTONE):
        return None
    cure = "send the request under a new key"
    if row["deleted_at"] is not None:
        detail = f"this idempotency key named job {row['job_id']}, which was deleted"
        raise IdempotencyConflict(detail, field="Idempotency-Key", cure=cure)
    (named,) = _jobs(tx, [row])
    if named.request_sha256 != made.request_sha256:
        detail = f"this idempotency key names job {named.id}, which has another request"
        cure = f"repeat the first request unchanged, or {cure}"
        raise IdempotencyConflict(detail, field="Idempotency-Key", cure=cure)
    return named


def submit(tx: Transaction, made: NewJob) -> tuple[JobRow, bool]:
    """Insert a job unless its owner's key names one; return the job and whether it is new.

    Raises IdempotencyConflict, and what `keys.check_quota` raises.
    """
    ended = and_(_of_key(made), SUBMISSION.c.deleted_at <= tx.now - TOMBSTONE)
    tx.connection.execute(delete(SUBMISSION).where(ended))
    claim = tx.insert(SUBMISSION).values(owner=made.owner or "", key=made.idempotency_key, job_id=made.id)
    # Waits for a transaction that is claiming the same key.
    claimed = claim.on_conflict_do_nothing().returning(SUBMISSION.c.job_id)
    if tx.connection.scalar(claimed) is None:
        named = submitted(tx, made)
        assert named is not None, "the key is neither claimed nor free"  # noqa: S101
        return named, False
    keys.check_quota(tx, made.owner)
    same = {name: getattr(made, name) for name in NewJob.__slots__ if name in JOB.c}
    request = made.request
    new = insert(JOB).values(
        **same,
        model=request.model,
        source_kind=request.source.kind,
        skips_canary=request.canary == "skip",
        keeps_local=request.storage.stays,
        publish_subject=request.hub.repo_id if request.hub else made.id,
        webhook=request.webhook.url if request.webhook else None,
        request_bytes=len(made.request_json.encode()),
        state=JobState.QUEUED,
        last_event=0,
        created_at=tx.now,
        updated_at=tx.now,
        **Progress().model_dump(),
    )
    tx.connection.execute(new)
    tx.connection.execute(insert(REQUEST).values(job_id=made.id, body=made.request_json))
    job_added = record(tx, lock_job(tx, made.id), "state", "submitted")
    add_task(tx, job_added, TaskKind.PLAN)
    return job(tx, made.id), True


def _of_key(made: NewJob) -> ColumnElement[bool]:
    return and_(SUBMISSION.c.owner == (made.owner or ""), SUBMISSION.c.key == made.idempotency_key)


def job(tx: Transaction, job_id: str) -> JobRow:
    """Return a job. Raises NotFound."""
    return _jobs(tx, [_one(tx, select(JOB).where(JOB.c.id == job_id), job_id)])[0]


def page(
    tx: Transaction,
    *,
    owner: str | None = None,
    state: JobState | None = None,
    cursor: str | None = None,
    limit: int = 50,
) -> tuple[list[JobRow], str | None]:
    """Return a page of jobs, newest first, of one owner if one is given, and the cursor of the next page.

    A job of which something cannot be read is listed with that as its problem. Raises RequestError for an
    unknown cursor.
    """
    query = select(JOB).order_by(JOB.c.number.desc()).limit(limit + 1)
    if owner is not None:
        query = query.where(JOB.c.owner == owner)
    if state is not None:
        query = query.where(JOB.c.state == state)
    if cursor is not None:
        if not CURSOR.fullmatch(cursor):
            raise RequestError(
                "the cursor is of no page", field="cursor", cure="begin again without a cursor"
            )
        query = query.where(JOB.c.number < int(cursor))
    rows = _listed(tx, query)
    return _jobs(tx, rows[:limit]), str(rows[limit - 1]["number"]) if len(rows) > limit else None


def _listed(tx: Transaction, query: Select[Any]) -> list[RowMapping]:
    """Return the rows of jobs. In one that cannot be read, that is the problem; other documents are null."""
    try:
        return [row._mapping for row in tx.connection.execute(query)]
    except ValidationError:
        rows: list[RowMapping] = []
        for job_id in tx.connection.scalars(query.with_only_columns(JOB.c.id)).all():
            of_job = query.where(JOB.c.id == job_id)
            try:
                rows += (row._mapping for row in rows_of(tx, of_job, JOB.c.id))
            except QuarryError as error:
                said = literal(error.problem(), JOB.c.problem.type).label("problem")
                unread = (null().label(name) for name in DOCUMENTS - {"problem"})
                readable = (column for column in JOB.c if column.name not in DOCUMENTS)
                rows += tx.connection.execute(of_job.with_only_columns(*readable, said, *unread)).mappings()
        return rows


def request_json(tx: Transaction, job_id: str) -> str:
    """Return a job's request as it was stored; it never changes. Raises NotFound."""
    return str(_one(tx, select(REQUEST.c.body).where(REQUEST.c.job_id == job_id), job_id)["body"])


def request_head(tx: Transaction, job_id: str, limit: int) -> str:
    """Return the first `limit` characters of a job's request, which may hold megabytes of samples."""
    head = select(func.substr(REQUEST.c.body, 1, limit)).where(REQUEST.c.job_id == job_id)
    return tx.connection.scalar(head) or ""


def request(tx: Transaction, job_id: str) -> ExtractRequest:
    """Return a job's request. Raises NotFound."""
    return ExtractRequest.model_validate_json(request_json(tx, job_id))


def cancel(tx: Transaction, job_id: str) -> JobRow:
    """Cancel a job, also one that cannot be read; it can be resumed. Raises NotFound, IllegalMove."""
    try:
        with tx.connection.begin_nested():
            return _stopped(tx, job_id, JobState.CANCELLED)
    except ValidationError:
        cancel_unread(tx, job_id)
        return _jobs(tx, _listed(tx, select(JOB).where(JOB.c.id == job_id)))[0]


def pause(tx: Transaction, job_id: str) -> JobRow:
    """Pause a job and give back its leases until it is resumed. Raises NotFound, IllegalMove."""
    return _stopped(tx, job_id, JobState.PAUSED)


def _stopped(tx: Transaction, job_id: str, state: JobState) -> JobRow:
    """Move the job to `state` unless it is already in it, and return it."""
    locked = lock_job(tx, job_id)
    if locked.state is not state:
        stop(tx, locked, state)
    return job(tx, job_id)


def set_priority(tx: Transaction, job_id: str, priority: int) -> JobRow:
    """Let a job's tasks be leased before those of lower priorities; tasks already leased stay leased.

    A job that has ended, or has that priority, is not changed. Raises NotFound.
    """
    locked, before = lock_job(tx, job_id), job(tx, job_id)
    if locked.state in ENDED_JOB_STATES or before.priority == priority:
        return before
    tx.connection.execute(update(JOB).where(JOB.c.id == job_id).values(priority=priority))
    record(tx, locked, "progress", f"priority {priority}")
    return job(tx, job_id)


def resume(tx: Transaction, job_id: str) -> JobRow:
    """Queue a stopped job again with what it has captured; failed units and counted deaths start afresh.

    A worker that rests from its model may probe it at once.

    Raises NotFound; IllegalMove, also if a later run of its schedule takes the rest of its samples; and what
    `keys.check_quota` raises if the job had ended, since it no longer counted against the quota.
    """
    locked = lock_job(tx, job_id)
    later = select(SCHEDULE.c.last_job).where(
        SCHEDULE.c.number == locked.schedule, SCHEDULE.c.last_job != job_id
    )
    if not locked.progress.is_captured and (last := tx.connection.scalar(later)) is not None:
        cure = "delete it; the next slot publishes what it wrote, if that is not done yet"
        raise IllegalMove(
            f"job {last} takes the samples that {job_id} did not write", field="state", cure=cure
        )
    if locked.state in STOPPED_JOB_STATES:
        keys.check_quota(tx, locked.owner)
    queue_again(tx, locked)
    workers.try_again(tx, job_id)
    return job(tx, job_id)


def queue_again(tx: Transaction, locked: LockedJob) -> None:
    """Queue a locked job again, whatever its owner's quota. Raises IllegalMove."""
    totals.keep(tx, {"units_failed": locked.progress.units_failed})
    locked = move_job(tx, locked, JobState.QUEUED)
    for task in tasks_in(tx, locked, TaskState.FAILED):
        fresh = replace(task, state=TaskState.PENDING)
        units_failed = -int(POLICIES[task.kind].of_units)
        locked = move_task(tx, locked, task, fresh, units_failed=units_failed)
    again = [kind for kind, policy in POLICIES.items() if JobState.QUEUED in policy.job_states]
    waiting = update(TASK).where(
        TASK.c.job_id == locked.id, TASK.c.state == TaskState.PENDING, TASK.c.kind.in_(again)
    )
    tx.connection.execute(waiting.values(attempts=0, deaths=0, not_before=None))
    # Such units still run alone.
    tx.connection.execute(waiting.where(TASK.c.lone_deaths.is_not(None)).values(lone_deaths=LoneDeaths()))


def note(tx: Transaction, job_id: str, problem: Problem) -> None:
    """Record a problem outside the job's own work as an event, if no recent one has it. Raises NotFound."""
    locked = lock_job(tx, job_id)
    recent = events(tx, job_id, after=locked.last_event - RECENT_EVENTS)
    if problem not in (event.problem for event in recent):
        record(tx, locked, "progress", problem.detail, problem, is_change=False)


def counts(tx: Transaction, worker: str | None = None) -> dict[JobState, int]:
    """Return the number of jobs in every state, without jobs to capture that `worker` cannot take now."""
    query = select(JOB.c.state, func.count()).group_by(JOB.c.state)
    if worker is not None:
        query = query.where(~workers.left_by(tx, worker) | JOB.c.state.not_in(TO_CAPTURE))
    rows = tx.connection.execute(query)
    return dict.fromkeys(JobState, 0) | {state: number for state, number in rows}


def num_events(tx: Transaction, owner: str | None = None) -> tuple[int, int]:
    """Return how many events the jobs of `owner`, or of all owners, have had, and how many jobs these are."""
    query = select(func.coalesce(func.sum(JOB.c.last_event), 0), func.count())
    events, number = tx.connection.execute(query.where(JOB.c.owner == owner) if owner else query).one()
    return int(events), number


def owner(tx: Transaction, job_id: str) -> str | None:
    """Return the name of the key that submitted a job; None is the operator. Raises NotFound."""
    found: str | None = _one(tx, select(JOB.c.owner).where(JOB.c.id == job_id), job_id)["owner"]
    return found


def state(tx: Transaction, job_id: str) -> JobState:
    """Return a job's state. Raises NotFound."""
    return JobState(_one(tx, select(JOB.c.state).where(JOB.c.id == job_id), job_id)["state"])


def events(tx: Transaction, job_id: str, *, after: int = 0, limit: int = 500) -> list[Event]:
    """Return events numbered above `after`, in order; later events always get higher numbers."""
    query = select(EVENT.c.entry).where(EVENT.c.job_id == job_id, EVENT.c.id > after)
    return [row.entry for row in rows_of(tx, query.order_by(EVENT.c.id).limit(limit), EVENT.c.job_id)]


def recent_events(tx: Transaction, job_id: str, limit: int) -> list[Event]:
    """Return the newest events of a job, newest first."""
    query = select(EVENT.c.entry).where(EVENT.c.job_id == job_id).order_by(EVENT.c.id.desc()).limit(limit)
    return [row.entry for row in rows_of(tx, query, EVENT.c.job_id)]


def unknown(job_id: str) -> NotFound:
    """Return the error for an id of no job, or of no job that the caller may see."""
    return NotFound(f"there is no job {job_id}", field="job_id")


def new_events(
    tx: Transaction, last: Mapping[str, int], limit: int
) -> dict[str, list[Event] | QuarryError | None]:
    """Return each job's newest events above the number in `last`; None for a job that was deleted.

    For a job whose events cannot be read, return that error. Jobs without new events are left out.
    """
    query = select(JOB.c.id, JOB.c.last_event).where(JOB.c.id.in_(last))
    numbers = {job_id: number for job_id, number in tx.connection.execute(query)}
    new: dict[str, list[Event] | QuarryError | None] = dict.fromkeys(last.keys() - numbers.keys())
    for job_id, number in numbers.items():
        if number > last[job_id]:
            try:
                new[job_id] = events(tx, job_id, after=max(last[job_id], number - limit), limit=limit)
            except QuarryError as error:
                new[job_id] = error
    return new


def _one(tx: Transaction, query: Select[Any], job_id: str) -> RowMapping:
    """Return the one row that a query finds for a job. Raises NotFound."""
    found = rows_of(tx, query, JOB.c.id)
    if not found:
        raise unknown(job_id)
    return found[0]._mapping


def _jobs(tx: Transaction, rows: Sequence[RowMapping]) -> list[JobRow]:
    names = [name for name in JobRow.__slots__ if name not in MADE]
    capturing = [row for row in rows if row["state"] in TO_CAPTURE]
    resting = workers.sick(tx, resting=True) if capturing else []
    places = workers.places(tx) if capturing else None

    def cause(row: RowMapping) -> str | None:
        if places is None or row["state"] not in TO_CAPTURE:
            return None
        starts = STARTS if row["id"] in places.starting else None
        of_job = (workers.waits(resting, row[name], row["owner"]) for name in ("model_sha256", "id"))
        rests = next(filter(None, of_job), None)
        if row["publish_subject"] == row["id"]:
            consumed = None if row["keeps_local"] else consumers.waits(tx, row["id"], places.disk)
            return rests or places.away or consumed or starts
        full = places.disk if places.everywhere or not row["keeps_local"] else None
        return rests or full or starts

    return [
        JobRow(
            progress=progress_of(row),
            repository=None if row["publish_subject"] == row["id"] else row["publish_subject"],
            waits=cause(row),
            **{name: row[name] for name in names},
        )
        for row in rows
    ]
