"""Taking a job away from everybody who works on it, for cancel, failure and block alike."""

from dataclasses import replace

from schemas.job import JobState, Problem, UnitState
from service.store import roles
from service.store.database import Transaction
from service.store.ledger import LockedJob, LockedUnit, lock_job, move_job, move_unit, units_in
from service.store.values import PublishLease


def void(unit: LockedUnit) -> LockedUnit:
    """Return a leased unit as it waits for its next attempt; this one was not at fault and does not count."""
    return replace(unit, state=UnitState.PENDING, owner=None, lease_until=None, attempts=unit.attempts - 1)


def stop(tx: Transaction, job: LockedJob, to: JobState, problem: Problem | None = None) -> LockedJob:
    """Move a locked job to a state in which nobody works on it, and void its leases. Raises IllegalMove."""
    job = move_job(tx, job, to, problem)
    roles.give_back(tx, job.id)
    for unit in units_in(tx, job, UnitState.LEASED):
        job = move_unit(tx, job, unit, void(unit))
    return job


def end(tx: Transaction, job_id: str, to: JobState, problem: Problem, lease: PublishLease | None) -> None:
    """Stop a job with a problem, for the holder of `lease` if one is given. Raises IllegalMove, LeaseLost."""
    job = lock_job(tx, job_id) if lease is None else roles.held(tx, lease)
    stop(tx, job, to, problem)
