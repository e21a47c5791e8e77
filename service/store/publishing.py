"""Publishing: one committer a repository takes a job whose units are all done, and completes it."""

from dataclasses import replace
from datetime import timedelta

from sqlalchemy import and_, or_, select

from schemas.events import Delay, Event
from schemas.job import JobState, Problem
from schemas.request import ExtractRequest
from service.store import roles
from service.store.database import Transaction
from service.store.ledger import LockedJob, lock_job, move_job, record
from service.store.roles import Role
from service.store.stopping import stop
from service.store.tables import EVENT, JOB
from service.store.values import PublishLease


def next_job(tx: Transaction) -> str | None:
    """Return the oldest job that can be published and whose repository nobody commits to."""
    ready = and_(JOB.c.state == JobState.RUNNING, JOB.c.plan_done, JOB.c.units_done == JOB.c.units_planned)
    query = select(JOB.c.id).where(
        or_(ready, JOB.c.state == JobState.PUBLISHING), ~roles.live(tx, Role.PUBLISH, JOB.c.publish_subject)
    )
    return tx.connection.scalar(query.order_by(JOB.c.number).limit(1))


def lease(
    tx: Transaction, job_id: str, request: ExtractRequest, owner: str, ttl_s: float
) -> PublishLease | None:
    """Lease the publishing of a job; none if another was faster or the job was stopped."""
    job = lock_job(tx, job_id)
    if job.state not in (JobState.RUNNING, JobState.PUBLISHING):
        return None
    taken = roles.take(tx, Role.PUBLISH, job.publish_subject, job_id, owner, ttl_s)
    if taken is None:
        return None
    if job.state is JobState.RUNNING:
        job = move_job(tx, job, JobState.PUBLISHING)
    return PublishLease(job_id, taken.epoch, owner, request, job.known_identity, job.provenance)


def delay(tx: Transaction, lease: PublishLease, problem: Problem, reached: int, deadline_s: float) -> None:
    """Tell why a job is not published yet; block it where it has stood still for `deadline_s`.

    Raises LeaseLost.
    """
    job = roles.held(tx, lease)
    stood = _standing(tx, job)
    stands = Delay(since=tx.now, reached=reached) if stood is None or reached > stood.reached else stood
    if tx.now - stands.since > timedelta(seconds=deadline_s):
        stop(tx, job, JobState.BLOCKED, problem)
    elif stands is not stood or problem != job.problem:
        # The same again is no news: the Hub may be asked hundreds of times before the deadline.
        told = "not published yet: it is tried again"
        record(tx, replace(job, problem=problem), "progress", told, problem, stands)


def advance(tx: Transaction, lease: PublishLease, reached: int) -> None:
    """Take a job's problem back when it gets further than where it stood still. Raises LeaseLost."""
    job = roles.held(tx, lease)
    stood = _standing(tx, job)
    if stood is not None and reached > stood.reached:
        record(tx, replace(job, problem=None), "progress", "publishing goes on")


def complete(tx: Transaction, lease: PublishLease, hub_commit: str | None) -> None:
    """End a job whose dataset stands whole where it was asked for. Raises LeaseLost."""
    job = roles.held(tx, lease)
    move_job(tx, replace(job, hub_commit=hub_commit), JobState.COMPLETED)
    roles.give_back(tx, job.id)


def _standing(tx: Transaction, job: LockedJob) -> Delay | None:
    """Return where a locked job stands still: while it is published, nobody else tells events of it."""
    last = select(EVENT.c.entry).where(EVENT.c.job_id == job.id, EVENT.c.id == job.last_event)
    event: Event = tx.connection.scalars(last).one()
    return event.delay
