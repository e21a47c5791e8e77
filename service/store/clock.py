"""The database's clock, set right after it was ahead: what was to last a while must not last until then."""

from datetime import timedelta

from sqlalchemy import and_, or_, select, true, update

from schemas.job import JobState
from service.store.database import Transaction
from service.store.migration import check_write
from service.store.policies import HUB_DELAYS
from service.store.tables import AT_WORK_STATES, HOST, JOB, OPEN_WEBHOOK, PAUSE, SICKNESS, TASK, WORKER
from service.store.values import TaskKind
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
    lease_s, wait_s = GONE * lease_s, max(LONGEST_S, HUB_DELAYS[1] * lease_s)
    at_work = TASK.c.job_id.in_(select(JOB.c.id).where(JOB.c.state.in_(AT_WORK_STATES | {JobState.DELETING})))
    for until, which, longest_s in (
        (TASK.c.lease_until, or_(at_work, OPEN_WEBHOOK), lease_s),
        (TASK.c.not_before, and_(at_work, TASK.c.kind != TaskKind.WEBHOOK), wait_s),
        (TASK.c.not_before, OPEN_WEBHOOK, WAITS_S[-1]),
        (PAUSE.c.until, true(), LONGEST_S),
        (SICKNESS.c.until, true(), max(rest_s, wait_s)),
        (WORKER.c.alive_until, true(), lease_s),
        (HOST.c.seen_at, true(), GAP_S),
        (HOST.c.there_since, true(), GAP_S),
    ):
        ahead = until > tx.now + timedelta(seconds=longest_s)
        tx.connection.execute(update(until.table).where(which, ahead).values({until: tx.now}))
