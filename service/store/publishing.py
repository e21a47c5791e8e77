"""Publishing: one committer per repository takes a job whose units are all done, and completes it."""

from dataclasses import replace

from sqlalchemy import update

from schemas.job import JobState
from service.store import storing, tasks
from service.store.database import Store, Transaction
from service.store.tables import UNIT_COMMIT
from service.store.task_choice import Choice
from service.store.transitions import LockedJob, move_job, record
from service.store.values import Lease, PublishLease, TaskKind


def lease(store: Store, owner: str, ttl_s: float, *, unpushed: bool = False) -> PublishLease | None:
    """Lease the publishing of the oldest captured job whose repository nobody else is publishing to.

    With `unpushed`, only of a job without a repository.
    """
    return tasks.lease(store, TaskKind.PUBLISH, _grant, owner, ttl_s, Choice(unpushed=unpushed))


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


def advance(tx: Transaction, lease: PublishLease) -> None:
    """Forget earlier attempts, deaths and problems, since a new commit was made. Raises LeaseLost."""
    job, task = tasks.held(tx, lease)
    tasks.forgive(tx, task)
    tasks.pause(tx, job.publish_subject, storing.APART)
    if job.problem is not None:
        record(tx, replace(job, problem=None), "progress", "publishing goes on")


def complete(tx: Transaction, lease: PublishLease, hub_commit: str | None) -> None:
    """Complete a job whose whole dataset is in `hub_commit`, None without a repository. Raises LeaseLost."""
    job, task = tasks.held(tx, lease)
    if hub_commit is not None:
        of_job = update(UNIT_COMMIT).where(UNIT_COMMIT.c.job_id == job.id, ~UNIT_COMMIT.c.is_stored)
        tx.connection.execute(of_job.values(is_stored=True))
        stored = {"units_stored": job.progress.units_done}
        if not job.keeps_local:
            stored["bytes_gone"] = job.progress.bytes_written
        job = replace(job, progress=job.progress.model_copy(update=stored))
        tasks.pause(tx, job.publish_subject, storing.APART)
    move_job(tx, replace(tasks.done(tx, job, task), hub_commit=hub_commit), JobState.COMPLETED)
