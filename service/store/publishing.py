"""Publishing: one committer a repository takes a job whose units are all done, and completes it."""

from dataclasses import replace

from sqlalchemy import and_, or_, select

from schemas.job import JobState
from schemas.request import ExtractRequest
from service.store import roles
from service.store.database import Transaction
from service.store.ledger import lock_job, move_job
from service.store.roles import Role
from service.store.tables import JOB
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
    epoch = roles.take(tx, Role.PUBLISH, job.publish_subject, job_id, owner, ttl_s)
    if epoch is None:
        return None
    if job.state is JobState.RUNNING:
        job = move_job(tx, job, JobState.PUBLISHING)
    return PublishLease(job_id, epoch, owner, request, job.known_identity, job.provenance)


def complete(tx: Transaction, lease: PublishLease, hub_commit: str | None) -> None:
    """End a job whose dataset stands whole where it was asked for. Raises LeaseLost."""
    job = roles.held(tx, lease)
    move_job(tx, replace(job, hub_commit=hub_commit), JobState.COMPLETED)
    roles.give_back(tx, job.id)
