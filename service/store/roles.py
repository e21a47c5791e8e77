"""Leases of named roles: one planner a job, one committer a repository.

A lease that ran out is good until another takes the role: the epoch fences its holder, never the time.
"""

from datetime import timedelta
from enum import StrEnum

from sqlalchemy import ColumnElement, and_, exists, select, update

from service.errors import LeaseLost
from service.store.database import Transaction
from service.store.ledger import LockedJob, lock_job
from service.store.tables import ROLE_LEASE
from service.store.values import PlanLease, PublishLease


class Role(StrEnum):
    """What there must be only one of: PLAN for a job, PUBLISH for a repository or for a job without one."""

    PLAN = "plan"
    PUBLISH = "publish"


def live(tx: Transaction, role: Role, subject: ColumnElement[str]) -> ColumnElement[bool]:
    """Return the condition that somebody holds `role` on `subject` now."""
    return exists().where(
        ROLE_LEASE.c.role == role, ROLE_LEASE.c.subject == subject, ROLE_LEASE.c.lease_until > tx.now
    )


def take(tx: Transaction, role: Role, subject: str, job_id: str, owner: str, ttl_s: float) -> int | None:
    """Take a role for a locked job and return its new epoch, or none while another holds it."""
    until = tx.now + timedelta(seconds=ttl_s)
    first = tx.insert(ROLE_LEASE).values(
        role=role, subject=subject, job_id=job_id, epoch=1, owner=owner, lease_until=until
    )
    either = first.on_conflict_do_update(
        index_elements=["role", "subject"],
        set_={"job_id": job_id, "epoch": ROLE_LEASE.c.epoch + 1, "owner": owner, "lease_until": until},
        where=ROLE_LEASE.c.lease_until <= tx.now,
    )
    epoch: int | None = tx.connection.scalar(either.returning(ROLE_LEASE.c.epoch))
    return epoch


def held(tx: Transaction, lease: PlanLease | PublishLease) -> LockedJob:
    """Lock a role and its job until the transaction ends. Raises LeaseLost if another took the role."""
    job = lock_job(tx, lease.job_id)
    if tx.connection.scalar(select(ROLE_LEASE.c.epoch).where(_mine(lease)).with_for_update()) is None:
        raise LeaseLost(
            f"{lease.owner} no longer holds epoch {lease.epoch} of its role in job {lease.job_id}"
        )
    return job


def extend(tx: Transaction, lease: PlanLease | PublishLease, ttl_s: float) -> None:
    """Let a role run for `ttl_s` from now. Raises LeaseLost."""
    held(tx, lease)
    until = tx.now + timedelta(seconds=ttl_s)
    tx.connection.execute(update(ROLE_LEASE).where(_mine(lease)).values(lease_until=until))


def give_back(tx: Transaction, job_id: str) -> None:
    """End every role held for a job; the epochs stay, so that what their holders still send is refused."""
    mine = update(ROLE_LEASE).where(ROLE_LEASE.c.job_id == job_id)
    tx.connection.execute(mine.values(owner=None, lease_until=tx.now))


def _mine(lease: PlanLease | PublishLease) -> ColumnElement[bool]:
    """Return the condition that fences every write of a role's holder."""
    return and_(
        ROLE_LEASE.c.role == (Role.PLAN if isinstance(lease, PlanLease) else Role.PUBLISH),
        ROLE_LEASE.c.job_id == lease.job_id,
        ROLE_LEASE.c.epoch == lease.epoch,
        ROLE_LEASE.c.owner == lease.owner,
    )
