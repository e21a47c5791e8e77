"""The database's clock, set right after it was ahead: what was to last a while must not last until then."""

from datetime import timedelta

from pydantic import ValidationError
from sqlalchemy import and_, delete, or_, select, true, update

from schemas.job import JobState
from service.store.database import Transaction
from service.store.migration import check_write
from service.store.policies import HUB_DELAYS
from service.store.schedule_tables import RUN, SCHEDULE
from service.store.tables import AT_WORK_STATES, HOST, JOB, OPEN_WEBHOOK, PAUSE, SICKNESS, TASK, WORKER
from service.store.values import SERVICE, TaskKind
from service.store.webhooks import WAITS_S
from service.store.workers import GAP_S, GONE

LONGEST_S = 3600.0
"""That the Hub may ask for; our own waits are shorter, but for those that are named below."""


def set_right(tx: Transaction, lease_s: float, rest_s: float) -> None:
    """End now what lies further ahead than anything waits: it was written when the clock was ahead.

    `lease_s` is how long a lease lasts, which may be another worker's a few times over; `rest_s` how long a
    worker rests.
    """
    check_write(tx)
    is_folder = HOST.c.number != SERVICE  # which sees itself by how much the clock was set
    lease_s, wait_s = GONE * lease_s, max(LONGEST_S, HUB_DELAYS[1] * lease_s)
    at_work = TASK.c.job_id.in_(select(JOB.c.id).where(JOB.c.state.in_(AT_WORK_STATES | {JobState.DELETING})))
    for until, which, longest_s in (
        (TASK.c.lease_until, or_(at_work, OPEN_WEBHOOK), lease_s),
        (TASK.c.not_before, and_(at_work, TASK.c.kind != TaskKind.WEBHOOK), wait_s),
        (TASK.c.not_before, OPEN_WEBHOOK, WAITS_S[-1]),
        (PAUSE.c.until, true(), LONGEST_S),
        (WORKER.c.alive_until, true(), lease_s),
        (SICKNESS.c.until, true(), max(rest_s, wait_s)),
        (HOST.c.seen_at, is_folder, GAP_S),
        (HOST.c.there_since, is_folder, GAP_S),
    ):
        ahead = and_(which, until > tx.now + timedelta(seconds=longest_s))
        in_order = select(until).where(ahead).order_by(*until.table.primary_key).with_for_update()
        tx.connection.execute(in_order)  # as whoever else locks several of them
        tx.connection.execute(update(until.table).where(ahead).values({until: tx.now}))


def set_slots_right(tx: Transaction) -> None:
    """Let the slots that were decided when the clock was ahead come at their time.

    A slot that became a job is that job, and comes to nothing when it comes again.
    """
    check_write(tx)
    ahead = or_(SCHEDULE.c.next_slot.is_(None), SCHEDULE.c.next_slot > tx.now)
    slots = select(SCHEDULE.c.number, SCHEDULE.c.next_slot).where(SCHEDULE.c.paused.is_(False), ahead)
    for number, decided in tx.connection.execute(slots).all():
        try:
            rules = tx.connection.scalar(select(SCHEDULE.c.rules).where(SCHEDULE.c.number == number))
        except ValidationError:
            continue  # damaged, or of a later version: it is paused when its slot comes
        slot = None if rules is None else rules.first_after(tx.now)
        if slot is not None and (decided is None or slot < decided):
            unchanged = SCHEDULE.c.number == number, SCHEDULE.c.next_slot.is_not_distinct_from(decided)
            tx.connection.execute(update(SCHEDULE).where(*unchanged).values(next_slot=slot))
            without_job = RUN.c.schedule == number, RUN.c.slot > tx.now, RUN.c.job_id.is_(None)
            tx.connection.execute(delete(RUN).where(*without_job))
