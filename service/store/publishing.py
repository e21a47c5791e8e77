"""Publishing: one committer a repository takes a job whose units are all done, and completes it."""

from dataclasses import replace
from datetime import timedelta

from sqlalchemy import select

from schemas.events import Delay, Event
from schemas.job import JobState, Problem
from service.store import tasks
from service.store.database import Store, Transaction
from service.store.ledger import LockedJob, move_job, record
from service.store.stopping import stop
from service.store.tables import EVENT
from service.store.values import Lease, PublishLease, TaskKind


def add_when_captured(tx: Transaction, job: LockedJob) -> None:
    """Add the publishing of a locked job whose plan and units are all done."""
    if job.progress.is_captured:
        tasks.add(tx, job, TaskKind.PUBLISH, subject=job.publish_subject)


def lease(store: Store, owner: str, ttl_s: float, *, unpushed: bool = False) -> PublishLease | None:
    """Lease the publishing of the oldest captured job whose repository nobody commits to.

    Of one without a repository, if it must be `unpushed`.
    """
    return tasks.lease(store, TaskKind.PUBLISH, _grant, owner, ttl_s, unpushed=unpushed)


def _grant(tx: Transaction, job: LockedJob, lease: Lease) -> PublishLease:
    if job.state is JobState.RUNNING:
        move_job(tx, job, JobState.PUBLISHING)
    assert job.captured_at is not None, "set by the last commit, or by a plan without units"  # noqa: S101
    return PublishLease(
        **lease.fields(),
        identity=job.known_identity,
        provenance=job.provenance,
        captured_at=job.captured_at,
    )


def delay(tx: Transaction, lease: PublishLease, problem: Problem, reached: int, deadline_s: float) -> None:
    """Record why a job is not published yet and give it back; block the job after `deadline_s` of it.

    `reached` is how far this lease had got (see `Delay`). Raises LeaseLost.
    """
    job, _ = tasks.held(tx, lease)
    last = _delay(tx, job)
    current = Delay(since=tx.now, reached=reached) if last is None or reached > last.reached else last
    if tx.now - current.since > timedelta(seconds=deadline_s):
        stop(tx, job, JobState.BLOCKED, problem)
        return
    news = current is not last
    tasks.put_off(tx, lease, problem, "not published yet: it is tried again", current, news=news)


def advance(tx: Transaction, lease: PublishLease, reached: int) -> None:
    """Forget earlier deaths, and a recorded delay that `reached` is beyond. Raises LeaseLost."""
    job, task = tasks.held(tx, lease)
    tasks.forgive(tx, task)
    last = _delay(tx, job)
    if last is not None and reached > last.reached:
        record(tx, replace(job, problem=None), "progress", "publishing goes on")


def complete(tx: Transaction, lease: PublishLease, hub_commit: str | None) -> None:
    """Complete a job whose whole dataset is in `hub_commit`, null without a repository. Raises LeaseLost."""
    job, task = tasks.held(tx, lease)
    move_job(tx, replace(tasks.done(tx, job, task), hub_commit=hub_commit), JobState.COMPLETED)


def _delay(tx: Transaction, job: LockedJob) -> Delay | None:
    """Return the delay that a locked job's last event reports; only its publisher records events now."""
    last = select(EVENT.c.entry).where(EVENT.c.job_id == job.id, EVENT.c.id == job.last_event)
    event: Event = tx.connection.scalars(last).one()
    return event.delay
