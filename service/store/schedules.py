"""Schedules: in one transaction, each slot becomes a job or is skipped by the schedule's rules.

Any number of processes may call `advance` at any time. The schedule's row is locked first, its next slot is
advanced in the transaction that makes the job, and the only clock used is the database's.
"""

import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime

from pydantic import ValidationError
from pydantic_core import from_json
from sqlalchemy import and_, delete, exists, func, insert, or_, select, update
from sqlalchemy.engine import RowMapping

from schemas.job import ENDED_JOB_STATES, JobState
from schemas.request import ExtractRequest
from schemas.schedule import (
    Missed,
    NewSchedule,
    Overlap,
    RunOutcome,
    RunView,
    Samples,
    ScheduleRules,
    ScheduleState,
    ScheduleView,
    UnreadableSchedule,
)
from schemas.source import PostedSource
from service.errors import STORE_AWAY, Conflict, NotFound, QuarryError, QuotaExceeded
from service.store import captured_samples, jobs, keys, runs, spools
from service.store.database import Transaction
from service.store.deletion import TOMBSTONE
from service.store.migration import check_behind_lock, check_write
from service.store.schedule_rows import Which, row_of
from service.store.schedule_tables import CAPTURED_SAMPLES, DELETED_SCHEDULE, RUN, SCHEDULE, SCHEDULE_REQUEST
from service.store.stopping import stop
from service.store.tables import JOB
from service.store.transitions import lock_job
from service.store.values import NewJob

SLOTS_SHOWN = 5
MAX_OF_OWNER = 1000
"""Maximum number of schedules of a key's owner: no quota counts their requests, of up to 2 MiB each."""


@dataclass(frozen=True, slots=True)
class _Schedule:
    """A schedule's row, locked by this transaction."""

    number: int
    name: str
    rules: ScheduleRules
    paused: bool
    next_slot: datetime | None
    waiting_slot: datetime | None
    last_job: str | None
    owner: str | None


def add(tx: Transaction, schedule: NewSchedule, owner: str | None = None) -> ScheduleView:
    """Add a schedule; its first slot is the next one from now.

    Raises Conflict if its name is taken, QuotaExceeded if its owner has too many.
    """
    check_write(tx)
    rules = schedule.rules()
    if owner is not None and len(spools.of_owner(tx, owner)) >= MAX_OF_OWNER:
        detail = f"{owner} has {MAX_OF_OWNER} schedules, the most that an owner may have"
        raise QuotaExceeded(detail, field="Authorization", cure="delete one")
    new = tx.insert(SCHEDULE).values(
        number=secrets.randbits(63),
        name=schedule.name,
        owner=owner,
        rules=rules,
        paused=False,
        next_slot=rules.first_after(tx.now),
        created_at=tx.now,
    )
    number = tx.connection.scalar(new.on_conflict_do_nothing().returning(SCHEDULE.c.number))
    if number is None:
        cure = "choose another name, or delete or change that schedule"
        raise Conflict(f"there is a schedule {schedule.name}", field="name", cure=cure)
    body = schedule.request.canonical_json()
    tx.connection.execute(insert(SCHEDULE_REQUEST).values(schedule=number, body=body))
    return schedule_view(tx, schedule.name)


def change(
    tx: Transaction,
    which: Which,
    changed: Callable[[ScheduleRules], ScheduleRules],
    paused: bool | None,
    request: ExtractRequest | None,
    refusal: str | None,
) -> ScheduleView:
    """Replace a schedule's rules by `changed(rules)`, and its `request`; pause or unpause it if given.

    Changed times apply from now on; slots already due are first decided by the old rules, or missed if the
    schedule is being paused, as is one that waits for a job's end. `refusal` is that of `advance`. Raises
    NotFound; Conflict if only one of the two requests reads posted samples, which wait for its jobs; and what
    `changed` raises.
    """
    schedule = _lock(tx, which)
    rules, paused = changed(schedule.rules), schedule.paused if paused is None else paused
    values: dict[str, object] = {"rules": rules, "paused": paused}
    if paused != schedule.paused or rules.times() != schedule.rules.times():
        while not paused and advance(tx, schedule.name, refusal):
            schedule = _lock(tx, which)
        missed = [] if schedule.paused else [schedule.next_slot]
        if paused != schedule.paused:
            missed.append(schedule.waiting_slot)  # otherwise it would run once the pause ends
            values["waiting_slot"] = None
        for slot in missed:
            if slot is not None and slot <= tx.now:
                detail = "the schedule was changed before it ran"
                runs.record(tx, schedule.number, slot, RunOutcome.MISSED, detail)
        values["next_slot"] = rules.first_after(tx.now)
    _update(tx, schedule.number, **values)
    if request is not None:
        _replace_request(tx, schedule, request)
    return schedule_view(tx, which)


def _replace_request(tx: Transaction, schedule: _Schedule, request: ExtractRequest) -> None:
    mine = SCHEDULE_REQUEST.c.schedule == schedule.number
    before = from_json(tx.connection.scalar(select(SCHEDULE_REQUEST.c.body).where(mine)) or "{}")
    kind = before.get("source", {}).get("kind")
    if "posted" in {kind, request.source.kind} and kind != request.source.kind:
        detail = f"the jobs of schedule {schedule.name} read a {kind} source, not a {request.source.kind} one"
        cure = "make another schedule with that source"
        raise Conflict(detail, field="request.source.kind", cure=cure)
    body = request.canonical_json()
    tx.connection.execute(update(SCHEDULE_REQUEST).where(mine).values(body=body))


def set_aside(tx: Transaction, name: str, detail: str) -> None:
    """Pause a schedule whose slot cannot be decided, and record the error as the slot's outcome.

    Its rules are not read, since they may be the cause.
    """
    slot = func.coalesce(SCHEDULE.c.waiting_slot, SCHEDULE.c.next_slot, type_=RUN.c.slot.type).label("slot")
    locked = select(SCHEDULE.c.number, slot).where(SCHEDULE.c.name == name).with_for_update()
    row = tx.connection.execute(locked).one_or_none()
    check_write(tx)
    if row is not None and row.slot is not None:
        _update(tx, row.number, paused=True, waiting_slot=None)
        runs.record(tx, row.number, row.slot, RunOutcome.REFUSED, detail)


def remove(tx: Transaction, which: Which) -> int:
    """Delete a schedule and the records of its slots and samples; return its number. Raises NotFound.

    Its jobs stay, and continue if their samples were already chosen. Its rules are not read: one whose rules
    are damaged can be deleted.
    """
    number: int = row_of(tx, select(SCHEDULE.c.number).with_for_update(), which)["number"]
    check_behind_lock(tx)
    # Locked: a concurrent commit either comes first, and what it adds is deleted, or sees no schedule.
    of_it = or_(JOB.c.schedule == number, JOB.c.spool == number)
    tx.connection.execute(select(JOB.c.id).where(of_it).order_by(JOB.c.number).with_for_update())
    tx.connection.execute(update(JOB).where(of_it).values(spool=None))
    for table in (RUN, SCHEDULE_REQUEST, CAPTURED_SAMPLES):
        tx.connection.execute(delete(table).where(table.c.schedule == number))
    tx.connection.execute(delete(SCHEDULE).where(SCHEDULE.c.number == number))
    long_gone = DELETED_SCHEDULE.c.deleted_at <= tx.now - TOMBSTONE
    tx.connection.execute(delete(DELETED_SCHEDULE).where(long_gone))
    tx.connection.execute(insert(DELETED_SCHEDULE).values(number=number, deleted_at=tx.now))
    return number


def due(tx: Transaction) -> list[str]:
    """Return the names of the schedules that `advance` may have something to do for."""
    goes_on = exists().where(JOB.c.id == SCHEDULE.c.last_job, JOB.c.state.not_in(ENDED_JOB_STATES))
    waiting = and_(SCHEDULE.c.waiting_slot.is_not(None), ~goes_on)
    query = select(SCHEDULE.c.name).where(
        SCHEDULE.c.paused.is_(False), or_(SCHEDULE.c.next_slot <= tx.clock, waiting)
    )
    return list(tx.connection.scalars(query.order_by(SCHEDULE.c.next_slot)))


def advance(tx: Transaction, name: str, refusal: str | None) -> bool:
    """Decide the next slot that is due; return whether there was one.

    With a `refusal` no job is made now: it is the outcome of a slot that would become a job.
    """
    try:
        schedule = _lock(tx, name)
    except NotFound:
        return False  # deleted meanwhile
    if schedule.paused:
        return False
    goes_on = _has_running_job(tx, schedule)
    if schedule.waiting_slot is not None and not goes_on:
        _update(tx, schedule.number, waiting_slot=None)
        _submit(tx, schedule, schedule.waiting_slot, refusal)
        return True
    slot, rules = schedule.next_slot, schedule.rules
    if slot is None or slot > tx.now:
        return False
    if rules.missed is Missed.ALL:
        if schedule.waiting_slot is not None:
            return False  # it waits for that one
    elif (last := rules.last_until(tx.now)) is not None and last > slot:
        detail = f"so were all later ones before {last:%Y-%m-%d %H:%M} UTC"
        runs.record(tx, schedule.number, slot, RunOutcome.MISSED, detail)
        slot = last
    following = rules.first_after(slot)
    if rules.missed is Missed.SKIP and tx.now - slot > runs.LATE:
        _update(tx, schedule.number, next_slot=following)
        detail = f"nobody looked until {tx.now:%Y-%m-%d %H:%M} UTC"
        runs.record(tx, schedule.number, slot, RunOutcome.MISSED, detail)
        return True
    if schedule.waiting_slot is not None:  # also if the rules no longer let a slot wait
        detail = f"it waited for job {schedule.last_job} until the next slot came"
        runs.record(tx, schedule.number, schedule.waiting_slot, RunOutcome.SKIPPED, detail)
    waits = goes_on and rules.overlap is Overlap.QUEUE
    _update(tx, schedule.number, next_slot=following, waiting_slot=slot if waits else None)
    if goes_on and rules.overlap is Overlap.SKIP:
        runs.record(tx, schedule.number, slot, RunOutcome.SKIPPED, f"job {schedule.last_job} had not ended")
    elif not waits:
        _submit(tx, schedule, slot, refusal)
    return True


def run_now(tx: Transaction, which: Which) -> RunView:
    """Make a job now, independently of the slots; an earlier one is cancelled if the rules say so.

    Raises NotFound; Conflict if an earlier job has not ended and is not to be cancelled.
    """
    schedule = _lock(tx, which)
    if _has_running_job(tx, schedule) and schedule.rules.overlap is not Overlap.REPLACE:
        cure = "wait for its end, or cancel it"
        raise Conflict(f"job {schedule.last_job} has not ended", field="name", cure=cure)
    _submit(tx, schedule, tx.now)
    return runs.page(tx, schedule.number, limit=1)[0]


def schedule_view(tx: Transaction, which: Which) -> ScheduleView:
    """Return the API's view of a schedule. Raises NotFound; QuarryError if its rules cannot be read."""
    return _view(tx, row_of(tx, select(SCHEDULE), which))


def numbered(tx: Transaction, which: Which) -> tuple[int, str | None]:
    """Return a schedule's number and its owner, the name of a key; None is the operator.

    Raises NotFound.
    """
    row = row_of(tx, select(SCHEDULE.c.number, SCHEDULE.c.owner), which)
    return row["number"], row["owner"]


def page(
    tx: Transaction, *, owner: str | None = None, after: str = "", limit: int = 50
) -> list[ScheduleView | UnreadableSchedule]:
    """Return schedules whose names sort after `after`, by name, of one owner if one is given."""
    columns = SCHEDULE.c.number, SCHEDULE.c.name, SCHEDULE.c.owner
    query = select(*columns).where(SCHEDULE.c.name > after).order_by(SCHEDULE.c.name).limit(limit)
    if owner is not None:
        query = query.where(SCHEDULE.c.owner == owner)
    found: list[ScheduleView | UnreadableSchedule] = []
    for number, name, of in tx.connection.execute(query).all():
        try:
            found.append(schedule_view(tx, number))
        except QuarryError as error:
            found.append(UnreadableSchedule(name=name, owner=of, problem=error.problem()))
    return found


def health(tx: Transaction) -> list[tuple[str, datetime, bool]]:
    """Return each schedule's name, when its last job completed (or it was created), and whether it fails.

    Future slots are not computed, which would take longer than everything else, nor all rules read, of which
    a row may be damaged.
    """
    columns = [column for column in SCHEDULE.c if column.name != "rules"]
    return [
        (row["name"], runs.last_good_at(tx, row["number"]) or row["created_at"], runs.is_failing(tx, row))
        for row in tx.connection.execute(select(*columns)).mappings().all()
    ]


def name_of(tx: Transaction, job_id: str) -> str | None:
    """Return the name of the schedule that made a job, or None if there is none or it was deleted."""
    of_job = select(SCHEDULE.c.name).join(RUN, RUN.c.schedule == SCHEDULE.c.number)
    name: str | None = tx.connection.scalar(of_job.where(RUN.c.job_id == job_id))
    return name


def request_json(tx: Transaction, which: Which) -> str:
    """Return the request from which a schedule's jobs are made. Raises NotFound."""
    return str(row_of(tx, select(SCHEDULE_REQUEST.c.body).join(SCHEDULE), which)["body"])


def past(tx: Transaction, which: Which, *, before: datetime | None = None, limit: int = 50) -> list[RunView]:
    """Return a schedule's slots before `before`, newest first. Raises NotFound."""
    number = row_of(tx, select(SCHEDULE.c.number), which)["number"]
    return runs.page(tx, number, before=before, limit=limit)


def _lock(tx: Transaction, which: Which) -> _Schedule:
    row = row_of(tx, select(SCHEDULE).with_for_update(), which)
    check_behind_lock(tx)
    return _Schedule(**{field: row[field] for field in _Schedule.__slots__})


def _has_running_job(tx: Transaction, schedule: _Schedule) -> bool:
    """Return whether the last job has not ended; it is locked, so nobody can resume it meanwhile."""
    if schedule.last_job is not None:
        captured_samples.lock_stopped(tx, schedule.number)  # the next job may publish these, which are older
        with suppress(NotFound):  # it was deleted
            return lock_job(tx, schedule.last_job).state not in ENDED_JOB_STATES
    return False


def _update(tx: Transaction, number: int, **values: object) -> None:
    tx.connection.execute(update(SCHEDULE).where(SCHEDULE.c.number == number).values(values))


def _submit(tx: Transaction, schedule: _Schedule, slot: datetime, refusal: str | None = None) -> None:
    """Make the job of a slot; cancel the previous job if it has not ended, and publish what it has written.

    If the job is refused, that is the slot's outcome, and the previous job continues. A slot that comes
    again, since the clock was set back, has its job.
    """
    of_slot = select(RUN.c.job_id).where(RUN.c.schedule == schedule.number, RUN.c.slot == slot)
    if tx.connection.scalar(of_slot) is not None:
        return
    if refusal is not None:
        runs.record(tx, schedule.number, slot, RunOutcome.REFUSED, refusal)
        return
    try:
        with tx.connection.begin_nested():
            job_id = _replace_job(tx, schedule, slot)
    except STORE_AWAY:
        raise
    except (QuarryError, ValidationError) as error:
        # The request was valid when it was given, but a later version may refuse it.
        runs.record(tx, schedule.number, slot, RunOutcome.REFUSED, str(error))
    else:
        runs.record(tx, schedule.number, slot, RunOutcome.SUBMITTED, job_id=job_id)


def _replace_job(tx: Transaction, schedule: _Schedule, slot: datetime) -> str:
    """Submit the job of a slot and make it the schedule's last job; return its id.

    Jobs that this ends no longer count when the owner's quota is checked. They are locked before the owner's
    keys, as in a resume.
    """
    request = ExtractRequest.model_validate_json(request_json(tx, schedule.name))
    if _has_running_job(tx, schedule):
        stop(tx, lock_job(tx, str(schedule.last_job)), JobState.CANCELLED)
    stopped = captured_samples.lock_stopped(tx, schedule.number)
    # No key from a caller can contain a tab.
    key = f"schedule\t{schedule.number}\t{slot.isoformat()}"
    new_only = schedule.number if schedule.rules.samples is Samples.NEW else None
    spool = schedule.number if isinstance(request.source, PostedSource) else None
    priority = keys.usual_priority(tx, schedule.owner)
    made = NewJob.of(jobs.new_id(), key, request, priority, new_only, spool, schedule.owner)
    job, _ = jobs.submit(tx, made)
    captured_samples.publish(tx, schedule.number, stopped)
    _update(tx, schedule.number, last_job=job.id)
    return job.id


def _view(tx: Transaction, row: RowMapping) -> ScheduleView:
    number, rules = row["number"], row["rules"]
    next_slots = () if row["paused"] else tuple(rules.first_slots(tx.now, SLOTS_SHOWN))
    if row["paused"]:
        state = ScheduleState.PAUSED
    else:
        is_over = not (next_slots or row["next_slot"] or row["waiting_slot"])
        state = ScheduleState.ENDED if is_over else ScheduleState.ACTIVE
    return ScheduleView(
        **rules.model_dump(),
        **{name: row[name] for name in ("name", "owner", "waiting_slot", "created_at")},
        state=state,
        next_slots=next_slots,
        last_run=next(iter(runs.page(tx, number, limit=1)), None),
        last_good_at=runs.last_good_at(tx, number),
        failing=runs.is_failing(tx, row),
    )
