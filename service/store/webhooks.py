"""Webhooks: one task per report of a job's end; its failure never affects the job."""

from dataclasses import replace
from datetime import timedelta
from urllib.parse import urlsplit

from sqlalchemy import exists, func, or_, select, update

from schemas.events import Event
from schemas.job import Problem
from schemas.webhook import REPORTED_JOB_STATES
from service.errors import IllegalMove, QuotaExceeded
from service.store import jobs, tasks
from service.store.database import Store, Transaction
from service.store.tables import EVENT, JOB, OPEN_WEBHOOK, TASK
from service.store.transitions import MAX_REPORTS, LockedJob, lock_job, move_task, record, reports
from service.store.values import JobRow, Lease, TaskKind, TaskState, WebhookLease

WAITS_S = (5, 300, 1800, 7200, 18_000, 36_000, 50_400, 72_000, 86_400)
"""Wait before each further attempt: the example of Standard Webhooks; the last is made after three days."""


def lease(store: Store, owner: str, ttl_s: float) -> WebhookLease | None:
    """Lease a report; `item` is the number of the reported event."""
    return tasks.lease(store, TaskKind.WEBHOOK, _grant, owner, ttl_s)


def _grant(tx: Transaction, job: LockedJob, lease: Lease) -> WebhookLease:
    of_event = select(EVENT.c.entry).where(EVENT.c.job_id == job.id, EVENT.c.id == lease.item)
    event: Event = tx.connection.execute(of_event).scalar_one()
    assert job.webhook is not None, "a task of a job that has a webhook"  # noqa: S101
    then = {
        "state": event.state,
        "progress": event.progress,
        "problem": event.problem,
        "updated_at": event.at,
    }
    view = jobs.job(tx, job.id).view().model_copy(update=then | {"waits": None})
    return WebhookLease(**lease.fields(), url=job.webhook, job=view)


def delivered(tx: Transaction, lease: WebhookLease, status: int) -> None:
    """End a report that was accepted. Raises LeaseLost."""
    job, task = tasks.held(tx, lease)
    _note(tx, tasks.done(tx, job, task), f"webhook: answered {status}", job.problem)


def undelivered(tx: Transaction, lease: WebhookLease, problem: Problem, wait_s: float = 0.0) -> None:
    """Let a report that was not accepted wait for its next attempt; give up after the last. Raises LeaseLost.

    All of the owner's reports to this host wait for at least `wait_s`, so that those to other hosts can
    proceed.
    """
    job, task = tasks.held(tx, lease)
    if task.attempts > len(WAITS_S):
        _note(tx, tasks.done(tx, job, task), "webhook: given up", problem)
        return
    due = tx.now + timedelta(seconds=WAITS_S[task.attempts - 1])
    waiting = replace(task, state=TaskState.PENDING, owner=None, lease_until=None, not_before=due)
    job = move_task(tx, job, task, replace(waiting, problem=problem))
    _note(tx, job, "webhook: not taken", problem)
    until = tx.now + timedelta(seconds=max(wait_s, WAITS_S[0]))
    of_owner = JOB.c.id == TASK.c.job_id, JOB.c.owner.is_not_distinct_from(job.owner)
    origin = f"https://{urlsplit(job.webhook or '').netloc}"
    urls = (JOB.c.webhook.startswith(f"{origin}{rest}", autoescape=True) for rest in "/?#")
    to_host = exists().where(*of_owner, or_(JOB.c.webhook == origin, *urls))
    early = or_(TASK.c.not_before.is_(None), TASK.c.not_before < until)
    others = update(TASK).where(OPEN_WEBHOOK, TASK.c.state == TaskState.PENDING, to_host, early)
    tx.connection.execute(others.values(not_before=until))


def _note(tx: Transaction, job: LockedJob, message: str, problem: Problem | None) -> None:
    record(tx, job, "progress", message, problem, is_change=False)


def again(tx: Transaction, job_id: str) -> JobRow:
    """Report a job's last end again, at once. Raises NotFound, IllegalMove, QuotaExceeded."""
    job = lock_job(tx, job_id)
    if job.webhook is None or job.state not in REPORTED_JOB_STATES:
        cure = f"a request with a `webhook` reports when its job is {', '.join(sorted(REPORTED_JOB_STATES))}"
        raise IllegalMove(f"job {job_id} is {job.state} and has nothing to report", field="state", cure=cure)
    if reports(tx, job.owner) >= MAX_REPORTS:
        cure = "wait until some were taken or given up"
        raise QuotaExceeded(f"{MAX_REPORTS} reports of the job's owner wait", field="webhook", cure=cure)
    of_job = TASK.c.job_id == job_id, TASK.c.kind == TaskKind.WEBHOOK
    last = tx.connection.scalar(select(func.max(TASK.c.item)).where(*of_job))
    tasks.begin_again(tx, job, TaskKind.WEBHOOK, last)
    return jobs.job(tx, job_id)
