"""Leases of named roles: one planner a job, one committer a repository.

A lease that ran out is good until another takes the role: the epoch fences its holder, never the time.
"""

from datetime import timedelta
from enum import StrEnum

from sqlalchemy import ColumnElement, Row, and_, case, exists, select, update

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


def take(
    tx: Transaction, role: Role, subject: str, job_id: str, owner: str, ttl_s: float
) -> Row[int, int] | None:
    """Take a role for a locked job; return its new epoch and silent deaths, or none while another holds it.

    A lease that ran out with its owner is one that was neither kept nor given back: a silent death.
    """
    until = tx.now + timedelta(seconds=ttl_s)
    first = tx.insert(ROLE_LEASE).values(
        role=role, subject=subject, job_id=job_id, epoch=1, owner=owner, lease_until=until
    )
    either = first.on_conflict_do_update(
        index_elements=["role", "subject"],
        set_={
            "job_id": job_id,
            "epoch": ROLE_LEASE.c.epoch + 1,
            "owner": owner,
            "lease_until": until,
            "silent_deaths": ROLE_LEASE.c.silent_deaths + case((ROLE_LEASE.c.owner.is_(None), 0), else_=1),
        },
        where=ROLE_LEASE.c.lease_until <= tx.now,
    )
    counted = either.returning(ROLE_LEASE.c.epoch, ROLE_LEASE.c.silent_deaths)
    return tx.connection.execute(counted).one_or_none()


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
    """End every role held for a job; the epochs stay, so that what their holders still send is refused.

    What was counted begins at none again, for a job that is resumed.
    """
    mine = update(ROLE_LEASE).where(ROLE_LEASE.c.job_id == job_id)
    tx.connection.execute(mine.values(owner=None, lease_until=tx.now, failures=0, silent_deaths=0))


def let_go(tx: Transaction, lease: PlanLease, failures: int) -> int:
    """Let a role wait for its lease's end without an owner; return its failures, these among them."""
    counted = update(ROLE_LEASE).values(owner=None, failures=ROLE_LEASE.c.failures + failures)
    let = counted.where(_mine(lease)).returning(ROLE_LEASE.c.failures)
    all_failures: int = tx.connection.scalars(let).one()
    return all_failures


def release(tx: Transaction, owner: str) -> None:
    """Give back what an owner holds that ended in order: neither a failure nor a death."""
    mine = update(ROLE_LEASE).where(ROLE_LEASE.c.owner == owner)
    tx.connection.execute(mine.values(owner=None, lease_until=tx.now))


def _mine(lease: PlanLease | PublishLease) -> ColumnElement[bool]:
    """Return the condition that fences every write of a role's holder."""
    return and_(
        ROLE_LEASE.c.role == (Role.PLAN if isinstance(lease, PlanLease) else Role.PUBLISH),
        ROLE_LEASE.c.job_id == lease.job_id,
        ROLE_LEASE.c.epoch == lease.epoch,
        ROLE_LEASE.c.owner == lease.owner,
    )
