"""Values and short ways to a given state of a job, for tests of whatever stands on the store."""

import threading
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

from sqlalchemy import NullPool, create_engine

from schemas.dataset.entries import FileEntry, LayerStats, ShardEntry
from schemas.dataset.manifest import UnitChecks
from schemas.identity import Identity, Provenance
from schemas.job import JOB_MOVES, JobState, Problem, RejectView
from schemas.names import index_path, shard_path
from schemas.request import ExtractRequest, HubTarget
from schemas.source import InlineSource, Sample
from service.settings import Settings
from service.store import (
    JobRow,
    NewJob,
    PlanLease,
    PlannedUnit,
    PublishLease,
    Store,
    TaskState,
    UnitCommit,
    UnitLease,
    commits,
    deletion,
    jobs,
    plans,
    publishing,
    units,
)
from service.store.stopping import stop
from service.store.transitions import lock_job
from tests.support import plans as plan_support

TTL_S = 60.0
OWNER = "worker-1"
ROOMY = Settings(data_dir=Path("/"), min_free_bytes=0)
"""Of a data folder that is never full."""
ENGINE = ("vllm", "0.32.0")
PROBLEM = Problem(
    type="urn:quarry:write-failed", title="A shard could not be written", status=503, detail="why"
)
IDENTITY = plan_support.identity(
    layer_ids=(1, 2, 4),
    hidden_size=64,
    num_layers=4,
    model="org/model",
    revision="c0ffee",
    on_too_long="truncate",
)
CHECKS = UnitChecks(rows_checked=2, logit_rows=1, logit_argmax_agree=1, logit_max_error=0.001)


CLOCK = "(SELECT now FROM test_clock)"


class Clock:
    """The time of the stores of a test, which stands still until it is moved: a table of one row in each."""

    def __init__(self, now_s: float = 1_800_000_000.0) -> None:
        """Begin at some second since 1970."""
        self.now_s = now_s
        self._urls: list[str] = []

    def of(self, url: str) -> str:
        """Return the SQL that stands for the time in the database at `url`."""
        if url not in self._urls:
            self._execute(
                url,
                "CREATE TABLE IF NOT EXISTS test_clock (now TIMESTAMP WITH TIME ZONE)",
                "DELETE FROM test_clock",
                f"INSERT INTO test_clock VALUES ('{self._text()}')",
            )
            self._urls.append(url)
        return CLOCK

    def advance(self, seconds: float) -> None:
        """Move on."""
        self.now_s += seconds
        for url in self._urls:
            self._execute(url, f"UPDATE test_clock SET now = '{self._text()}'")

    def _text(self) -> str:
        """Return the time as both databases read it; SQLite has no zones and stores UTC."""
        return datetime.fromtimestamp(self.now_s, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")

    @staticmethod
    def _execute(url: str, *statements: str) -> None:
        engine = create_engine(url, poolclass=NullPool)
        if engine.dialect.name == "sqlite":
            Path(str(engine.url.database)).parent.mkdir(parents=True, exist_ok=True)
        with engine.begin() as connection:
            if engine.dialect.name == "postgresql":
                connection.exec_driver_sql("SET LOCAL TIME ZONE 'UTC'")
            for statement in statements:
                connection.exec_driver_sql(statement)


class Beats:
    """The event that the thread which keeps a lease waits for: it comes after ten beats, each at once.

    Every beat moves the clock on by what the thread would have waited; then another owner tries to `take` the
    role. `over` is set when that has succeeded, or when the lease was extended after the last beat.
    """

    def __init__(self, clock: Clock, take: Callable[[], object], num_beats: int = 10) -> None:
        """Wait for nothing yet."""
        self.waits_s: list[float] = []
        self.taken: object = None
        self.over = threading.Event()
        self._clock, self._take, self._num_beats = clock, take, num_beats
        self._ended = threading.Event()

    def set(self) -> None:
        """Let the thread end."""
        self._ended.set()

    def is_set(self) -> bool:
        """Return whether the thread may end."""
        return self._ended.is_set()

    def wait(self, timeout: float) -> bool:
        """Beat; when it is over, wait in earnest."""
        if self.taken is None and len(self.waits_s) < self._num_beats:
            self.waits_s.append(timeout)
            self._clock.advance(timeout)
            self.taken = self._take()
            if self.taken is None:
                return False
        self.over.set()
        return self._ended.wait(60)


def job_id(number: int) -> str:
    """Return a job id of the right form."""
    return f"j-{number:016x}"


def a_request(text: str = "hello", repo_id: str | None = None) -> ExtractRequest:
    """Return a request of one inline sample."""
    source = InlineSource(kind="inline", samples=(Sample(text=text),))
    return ExtractRequest(
        model="org/model", source=source, loss="all", hub=HubTarget(repo_id=repo_id) if repo_id else None
    )


def provenance(engine_version: str = ENGINE[1], identity: Identity = IDENTITY) -> Provenance:
    """Return the provenance of a job's units."""
    return plan_support.provenance(identity, job_id(1), (ENGINE[0], engine_version))


def planned(unit: int, num_samples: int = 2) -> PlannedUnit:
    """Return a planned unit of five tokens a sample."""
    return PlannedUnit(unit, num_samples, 5 * num_samples, f"plan {unit}".encode())


def reject(position: int, reason: str = "empty-mask") -> RejectView:
    """Return a reject of the source's row `position`."""
    return RejectView(
        position=position, source_id=None, sample_id=None, reason=reason, detail="no token is supervised"
    )


def shard(lease: UnitLease, rows: int) -> ShardEntry:
    """Return the entry of a shard that `lease` may have made."""
    job, unit, epoch = lease.attempt_id.job_id, lease.attempt_id.unit, lease.attempt_id.epoch
    layers = (LayerStats(layer_id=4, mean_rms=1.0, max_abs=3.0),)
    path = shard_path(job, unit)
    return ShardEntry(
        path=path,
        sha256=f"{epoch:064x}",
        xxh3=f"{epoch:032x}",
        bytes=1000 * rows,
        rows=rows,
        tokens=5 * rows,
        unit=unit,
        epoch=epoch,
        layers=layers,
    )


def made(lease: UnitLease, rejects: Sequence[RejectView] = ()) -> UnitCommit:
    """Return a whole commit for `lease`: what is not rejected is written."""
    rows = lease.num_samples - len(rejects)
    return UnitCommit(
        attempt_id=lease.attempt_id,
        provenance=plan_support.provenance(lease.identity, lease.attempt_id.job_id, ENGINE),
        shards=(shard(lease, rows),) if rows else (),
        index=FileEntry(
            path=index_path(lease.attempt_id.job_id, lease.attempt_id.unit), sha256="3" * 64, bytes=100
        )
        if rows
        else None,
        rejects=tuple(rejects),
        num_tokens=5 * rows,
        supervised_tokens=3 * rows,
        checks=CHECKS,
    )


def commit(store: Store, lease: UnitLease, rejects: Sequence[RejectView] = ()) -> None:
    """Commit all that `made` returns."""
    store.write(commits.commit, made(lease, rejects), lease)


def stop_job(
    store: Store, job_id: str, state: JobState = JobState.BLOCKED, problem: Problem = PROBLEM
) -> None:
    """Fail or block a job, whoever works on it."""
    with store.writing() as tx:
        stop(tx, lock_job(tx, job_id), state, problem)


def submit(store: Store, number: int = 1, repo_id: str | None = None) -> JobRow:
    """Submit job `number`."""
    return store.write(jobs.submit, NewJob.of(job_id(number), f"key-{number}", a_request(repo_id=repo_id)))[0]


def start_plan(
    store: Store, number: int = 1, repo_id: str | None = None, identity: Identity = IDENTITY
) -> PlanLease:
    """Submit a job and lease its planning, its identity fixed."""
    submit(store, number, repo_id)
    lease = lease_plan(store)
    store.write(plans.set_identity, lease, identity)
    return lease


def start_units(
    store: Store,
    units: int = 2,
    number: int = 1,
    repo_id: str | None = None,
    identity: Identity = IDENTITY,
    num_samples: int = 2,
) -> PlanLease:
    """Bring a job to where all its units wait and its plan is done; the lease that comes back is over."""
    lease = start_plan(store, number, repo_id, identity)
    for unit in range(units):
        store.write(plans.add_unit, lease, planned(unit, num_samples), ())
    store.write(plans.finish, lease, () if units else (reject(0),))
    return lease


def capture(store: Store, units: int = 1, number: int = 1, repo_id: str | None = None) -> None:
    """Bring a job to where all its units are done."""
    start_units(store, units, number, repo_id)
    for _ in range(units):
        commit(store, lease_unit(store, job=job_id(number)))


def account(store: Store) -> tuple[object, ...]:
    """Return all that a write on job 1 could leave behind."""
    name = job_id(1)
    return (
        store.read(jobs.job, name),
        store.read(units.of_job, name),
        store.read(commits.shards, name),
        store.read(commits.unit_commits, name),
        store.read(commits.rejects, name),
        store.read(jobs.events, name),
    )


def check_sums(store: Store, name: str) -> None:
    """Compare every counter with the rows it counts, and the events with the states."""
    row = store.read(jobs.job, name)
    all_units, committed = store.read(units.of_job, name), store.read(commits.unit_commits, name)
    progress, states = row.progress, [unit.state for unit in all_units]
    rejects = store.read(commits.rejects, name)
    assert progress.units_planned == len(all_units)
    assert progress.units_done == states.count(TaskState.DONE) == len(committed)
    assert progress.units_failed == states.count(TaskState.FAILED)
    assert progress.tokens_planned == sum(unit.num_tokens for unit in all_units)
    assert progress.samples_rejected == len(rejects)
    of_plan = len(rejects) - sum(len(one.rejects) for one in committed)
    assert progress.samples_planned == sum(unit.num_samples for unit in all_units) + of_plan
    shards = store.read(commits.shards, name)
    assert progress.samples_written == sum(entry.rows for entry in shards)
    assert progress.bytes_written == sum(entry.bytes for entry in shards)
    assert progress.tokens_written == sum(one.num_tokens for one in committed)
    epochs = {unit.unit: unit.epoch for unit in all_units}
    for one in committed:
        assert one.attempt_id.epoch <= epochs[one.attempt_id.unit]
        assert all(entry.epoch == one.attempt_id.epoch for entry in one.shards)
    if row.state is not JobState.RUNNING:
        assert TaskState.LEASED not in states
    if row.state is JobState.COMPLETED:
        assert progress.samples_written + progress.samples_rejected == progress.samples_planned
    events = store.read(jobs.events, name, limit=10_000)
    assert [event.id for event in events] == list(range(1, len(events) + 1))
    assert (events[-1].progress, events[-1].state) == (progress, row.state)
    for before, after in pairwise(events):
        assert after.state is before.state or after.state in JOB_MOVES[before.state]


def reach(store: Store, state: JobState, number: int = 1) -> JobRow:
    """Bring a new job to `state`."""
    name = job_id(number)
    if state is JobState.QUEUED:
        return submit(store, number)
    if state is JobState.RUNNING:
        start_plan(store, number)
    elif state in {JobState.CANCELLED, JobState.PAUSED, JobState.DELETING}:
        submit(store, number)
        store.write(jobs.pause if state is JobState.PAUSED else jobs.cancel, name)
        if state is JobState.DELETING:
            store.write(deletion.begin, name, with_dataset=False)
    elif state is JobState.FAILED:
        start_plan(store, number)
        stop_job(store, name, JobState.FAILED)
    elif state is JobState.BLOCKED:
        start_plan(store, number)
        stop_job(store, name)
    else:
        capture(store, number=number)
        lease = lease_publish(store)
        if state is JobState.COMPLETED:
            store.write(publishing.complete, lease, None)
    return store.read(jobs.job, name)


def lease_plan(store: Store, owner: str = OWNER) -> PlanLease:
    """Lease a plan that must be there."""
    lease = plans.lease(store, owner, TTL_S)
    assert lease is not None
    return lease


def lease_unit(store: Store, owner: str = OWNER, job: str | None = None) -> UnitLease:
    """Lease a unit that must be there."""
    lease = units.lease(store, owner, TTL_S, prefer_job=job)
    assert lease is not None
    return lease


def lease_publish(store: Store, owner: str = OWNER) -> PublishLease:
    """Lease a publishing that must be there."""
    lease = publishing.lease(store, owner, TTL_S)
    assert lease is not None
    return lease
