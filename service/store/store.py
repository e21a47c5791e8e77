"""The store's verbs, each one transaction: opened here, carried out in the module of its noun."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from schemas.dataset.manifest import FileEntry, SealedShard
from schemas.events import Event
from schemas.identity import Identity
from schemas.job import JobState, JobSummary, Problem, Progress, RejectView
from schemas.request import ExtractRequest
from service.errors import Outcome
from service.store import canaries, commits, jobs, plans, publishing, tasks, units
from service.store.database import Database, Transaction
from service.store.migration import check, migrate
from service.store.values import (
    JobRow,
    Lease,
    PlanLease,
    PlannedUnit,
    PublishLease,
    TaskKind,
    UnitCommit,
    UnitLease,
    UnitRow,
)

AnyLease = TypeVar("AnyLease", bound=Lease)


class Store:
    """Jobs, units and leases in SQLite or PostgreSQL, shared by any number of threads and processes.

    A lease carries an epoch: what its holder writes after another took over raises LeaseLost and is not kept.
    Times are UTC and the database's own, whatever the clocks of the hosts. A verb about an unknown job raises
    NotFound, but its lists are empty. Every verb may raise StoreUnavailable, and DiskFull where it writes.
    """

    def __init__(self, url: str, clock: str | None = None) -> None:
        """Prepare a store at an SQLAlchemy URL; `clock` is SQL in place of the database's own time.

        Raises OptionRefused.
        """
        self._database = Database(url, clock)

    def migrate(self) -> None:
        """Bring the tables to this version; processes that start at once take turns."""
        migrate(self._database)

    def close(self) -> None:
        """Close the idle connections."""
        self._database.close()

    def submit(self, job_id: str, idempotency_key: str, request: ExtractRequest) -> tuple[JobRow, bool]:
        """Return the job of a key, and whether it is new. Raises IdempotencyConflict for another request."""
        with self._database.write() as tx:
            return jobs.submit(tx, job_id, idempotency_key, request)

    def job(self, job_id: str) -> JobRow:
        """Return a job. Raises NotFound."""
        with self._database.read() as tx:
            return jobs.job(tx, job_id)

    def summary(self, job_id: str) -> JobSummary:
        """Return a job without its request, which may be large. Raises NotFound."""
        with self._database.read() as tx:
            return jobs.summary(tx, job_id)

    def jobs(
        self, *, state: JobState | None = None, cursor: str | None = None, limit: int = 50
    ) -> tuple[list[JobSummary], str | None]:
        """Return a page of jobs without their requests, newest first, and the next page's cursor.

        Raises RequestError for a bad cursor.
        """
        with self._database.read() as tx:
            return jobs.jobs(tx, state, cursor, limit)

    def cancel(self, job_id: str) -> JobRow:
        """Stop a job and void its leases; a cancelled one stays as it is. Raises NotFound, IllegalMove."""
        with self._database.write() as tx:
            return jobs.cancel(tx, job_id)

    def resume(self, job_id: str) -> JobRow:
        """Queue a stopped job with all it has; failed units and counted deaths start afresh.

        Raises NotFound, IllegalMove.
        """
        with self._database.write() as tx:
            return jobs.resume(tx, job_id)

    def counts(self) -> dict[JobState, int]:
        """Return the number of jobs in every state."""
        with self._database.read() as tx:
            return jobs.counts(tx)

    def state(self, job_id: str) -> JobState:
        """Return a job's state without reading its request, which may be large. Raises NotFound."""
        with self._database.read() as tx:
            return jobs.state(tx, job_id)

    def totals(self) -> Progress:
        """Return the counters of all jobs together; `plan_done` is false."""
        with self._database.read() as tx:
            return jobs.totals(tx)

    def check(self) -> None:
        """Say nothing if the database answers and its tables are this version's. Raises StoreUnavailable."""
        check(self._database)

    def events(self, job_id: str, *, after: int = 0, limit: int = 500) -> list[Event]:
        """Return events numbered above `after`, in order; none that comes later gets a lower number."""
        with self._database.read() as tx:
            return jobs.events(tx, job_id, after, limit)

    def lease_plan(self, owner: str, ttl_s: float) -> PlanLease | None:
        """Lease the planning of the oldest job that has no planner; queued jobs run, planned ones too."""
        return self._lease(TaskKind.PLAN, plans.lease, owner, ttl_s)

    def extend(self, leases: Sequence[AnyLease], ttl_s: float) -> list[AnyLease]:
        """Let leases run for `ttl_s` from now; return those that are lost."""
        with self._database.write() as tx:
            return tasks.extend(tx, leases, ttl_s)

    def release(self, lease: Lease) -> None:
        """Give a task back; the attempt does not count. Raises LeaseLost."""
        with self._database.write() as tx:
            tasks.release(tx, lease)

    def release_owner(self, owner: str) -> None:
        """Give back all tasks of an owner that has ended, so that nobody waits for them."""
        with self._database.write() as tx:
            tasks.release_owner(tx, owner)

    def fail(self, lease: Lease, problem: Problem, outcome: Outcome, max_attempts: int) -> None:
        """End an attempt with a problem. Raises LeaseLost.

        RETRY lets the task wait again until it has had `max_attempts`; then a capture fails its job, and
        another task blocks it. FAIL fails the job at once; BLOCK blocks it, and the attempt does not count,
        nor does one that is VOID.
        """
        with self._database.write() as tx:
            tasks.fail(tx, lease, problem, outcome, max_attempts)

    def set_identity(self, lease: PlanLease, identity: Identity) -> None:
        """Fix what the dataset is, before its first unit. Raises IdentityChanged, LeaseLost."""
        with self._database.write() as tx:
            plans.set_identity(tx, lease, identity)

    def add_unit(self, lease: PlanLease, unit: PlannedUnit, rejects: Sequence[RejectView]) -> None:
        """Add a unit and the rejects planned with it; the same again is nothing.

        Raises IdentityChanged if it was planned with other samples, LeaseLost.
        """
        with self._database.write() as tx:
            plans.add_unit(tx, lease, unit, rejects)

    def finish_plan(self, lease: PlanLease, rejects: Sequence[RejectView]) -> None:
        """Close the plan with the rejects after its last unit, and end the lease.

        Raises SourceRefused if the plan is empty, LeaseLost.
        """
        with self._database.write() as tx:
            plans.finish(tx, lease, rejects)

    def lease_unit(self, owner: str, ttl_s: float, *, prefer_job: str | None = None) -> UnitLease | None:
        """Lease the lowest free unit of the preferred running job, or else of the oldest that has one.

        A job is blocked on the way where too many workers died without a word over the unit to be leased.
        """
        return self._lease(TaskKind.CAPTURE, units.lease, owner, ttl_s, prefer_job)

    def commit_unit(self, commit: UnitCommit, lease: UnitLease) -> None:
        """Make a unit done, with its shards, index and rejects, or change nothing.

        Raises:
            LeaseLost: another attempt owns the unit, it is done already, or its job was stopped.
            IdentityChanged: captured for another identity, or by another engine than the job's first unit.
            StatesWrong: a sample is missing or doubled, or a shard is another attempt's.
        """
        with self._database.write() as tx:
            commits.commit(tx, commit, lease)

    def lease_publish(self, owner: str, ttl_s: float) -> PublishLease | None:
        """Lease the publishing of the oldest whole job whose repository nobody commits to."""
        return self._lease(TaskKind.PUBLISH, publishing.lease, owner, ttl_s)

    def delay_publish(self, lease: PublishLease, problem: Problem, reached: int, deadline_s: float) -> None:
        """Record why a job is not published yet and give it back; block it after `deadline_s` of it.

        `reached` is how far this lease had got (see `Delay`). Raises LeaseLost.
        """
        with self._database.write() as tx:
            publishing.delay(tx, lease, problem, reached, deadline_s)

    def advance_publish(self, lease: PublishLease, reached: int) -> None:
        """Take back what was told of a delay, where `reached` is beyond it. Raises LeaseLost."""
        with self._database.write() as tx:
            publishing.advance(tx, lease, reached)

    def complete_job(self, lease: PublishLease, hub_commit: str | None) -> None:
        """Complete a job; `hub_commit` holds it whole, and is null without a repository. Raises LeaseLost."""
        with self._database.write() as tx:
            publishing.complete(tx, lease, hub_commit)

    def units(self, job_id: str) -> list[UnitRow]:
        """Return the units of a job, lowest first."""
        with self._database.read() as tx:
            return units.units(tx, job_id)

    def shards(self, job_id: str, *, skip: int = 0, limit: int | None = None) -> list[SealedShard]:
        """Return the committed shards of a job, in unit order: `limit` of them after the first `skip`."""
        with self._database.read() as tx:
            return commits.shards(tx, job_id, skip, limit)

    def indexes(self, job_id: str) -> list[FileEntry]:
        """Return the committed index files of a job, in unit order."""
        with self._database.read() as tx:
            return commits.indexes(tx, job_id)

    def unit_commits(self, job_id: str) -> list[UnitCommit]:
        """Return what was committed, in unit order."""
        with self._database.read() as tx:
            return commits.unit_commits(tx, job_id)

    def rejects(self, job_id: str, *, after: int = -1, limit: int = 1000) -> list[RejectView]:
        """Return rejects at positions above `after`, in that order, of the plan and of the units alike."""
        with self._database.read() as tx:
            return commits.rejects(tx, job_id, after, limit)

    def canary(self, key: str) -> str | None:
        """Return the canary report stored under `key`."""
        with self._database.read() as tx:
            return canaries.canary(tx, key)

    def record_canary(self, key: str, report_json: str) -> None:
        """Store a canary report, in place of an older one."""
        with self._database.write() as tx:
            canaries.record(tx, key, report_json)

    def _lease(
        self,
        kind: TaskKind,
        take: Callable[[Transaction, str, ExtractRequest, str, float], AnyLease | None],
        owner: str,
        ttl_s: float,
        prefer_job: str | None = None,
    ) -> AnyLease | None:
        """Try job after job, each in a transaction; one that another took meanwhile is no longer the next.

        The request, which may be large, is read before the job is locked.
        """
        while True:
            with self._database.read() as tx:
                job_id = tasks.next_job(tx, kind, prefer_job)
                if job_id is None:
                    return None
                request = jobs.request(tx, job_id)
            with self._database.write() as tx:
                lease = take(tx, job_id, request, owner, ttl_s)
            if lease is not None:
                return lease
