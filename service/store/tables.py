"""The tables: columns for what statements filter or order by, JSON documents for what is read as a whole.

A job's request has its own table: it may hold 8 MiB of inline samples, and SQLite rewrites a whole row
whenever a counter in it changes.
"""

from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    ColumnElement,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    TextClause,
    false,
    text,
)

from schemas.dataset.entries import FileEntry, ShardEntry
from schemas.dataset.manifest import UnitChecks
from schemas.events import Event
from schemas.identity import Identity, Provenance
from schemas.job import JobState, Problem, Progress, RejectView
from schemas.keys import Grants
from schemas.worker import WorkerStatus
from service.store.column_types import Document, ShownDocument, UtcTime, states
from service.store.values import LoneDeaths, TaskKind, TaskState

METADATA = MetaData()

AT_WORK_STATES = frozenset({JobState.QUEUED, JobState.RUNNING, JobState.PUBLISHING})
AT_WORK = text("state IN ({})".format(", ".join(f"'{state.value}'" for state in sorted(AT_WORK_STATES))))
"""A condition on a job. A partial index is used only if a query repeats its condition exactly."""


def _partial_index(
    name: str, *columns: ColumnElement[Any], where: ColumnElement[bool] | TextClause, unique: bool = False
) -> None:
    """Add an index of those rows of a table for which a condition holds."""
    Index(name, *columns, unique=unique, sqlite_where=where, postgresql_where=where)


JOB = Table(
    "job",
    METADATA,
    # The order of submission. SQLite auto-numbers only a column of type INTEGER.
    Column("number", BigInteger().with_variant(Integer, "sqlite"), primary_key=True),
    Column("id", String(32), nullable=False, unique=True),
    Column("request_sha256", String(64), nullable=False),
    # Counts against its owner's `max_bytes` until the job is deleted.
    Column("request_bytes", BigInteger, nullable=False),
    Column("publish_subject", Text, nullable=False),
    # Copied from the request, for listings of many jobs.
    Column("model", Text, nullable=False),
    Column("source_kind", String(16), nullable=False),
    Column("skips_canary", Boolean, nullable=False),
    Column("keeps_local", Boolean, nullable=False),
    # The URL to which its ends are reported.
    Column("webhook", Text),
    Column("priority", Integer, nullable=False),
    # The schedule whose earlier runs' samples the job skips. No foreign key: it may be deleted.
    Column("schedule", BigInteger().with_variant(Integer, "sqlite")),
    # The schedule whose posted samples the job takes, until the schedule is deleted.
    Column("spool", BigInteger().with_variant(Integer, "sqlite")),
    # The name of the key that made it; null for the operator.
    Column("owner", String(63)),
    Column("state", states(JobState), nullable=False),
    *(
        Column(name, Boolean if name == "plan_done" else BigInteger, nullable=False)
        for name in Progress.model_fields
    ),
    Column("problem", ShownDocument(Problem)),
    Column("identity", Document(Identity)),
    # The identity's digest of the model, by which workers rest from a model.
    Column("model_sha256", String(64)),
    Column("provenance", Document(Provenance)),
    Column("hub_commit", Text),
    # Where the last pass over its source begins.
    Column("pass_unit", BigInteger, nullable=False, server_default="0"),
    Column("pass_position", BigInteger, nullable=False, server_default="0"),
    # When its latest unit was committed, or its plan was finished without units.
    Column("captured_at", UtcTime),
    # When the job is deleted: whether its dataset in the data folder is deleted, too.
    Column("deletes_dataset", Boolean, nullable=False, server_default=false()),
    Column("last_event", BigInteger, nullable=False),
    Column("created_at", UtcTime, nullable=False),
    Column("updated_at", UtcTime, nullable=False),
    Index("job_by_state", "state", "number"),
    Index("job_by_owner", "owner", "number"),
)
_partial_index("job_by_priority", JOB.c.priority.desc(), JOB.c.number, where=AT_WORK)

# Idempotency keys. A row outlives its job as a tombstone, so that the key does not name another job
# meanwhile.
SUBMISSION = Table(
    "submission",
    METADATA,
    # As in `job`, but empty for the operator, since null equals nothing.
    Column("owner", String(63), primary_key=True),
    Column("key", Text, primary_key=True),
    # No foreign key: the job may be deleted.
    Column("job_id", String(32), nullable=False, unique=True),
    Column("deleted_at", UtcTime),
)

REQUEST = Table(
    "request",
    METADATA,
    Column("job_id", ForeignKey("job.id"), primary_key=True),
    Column("body", Text, nullable=False),
)

UNIT = Table(
    "unit",
    METADATA,
    Column("job_id", ForeignKey("job.id"), primary_key=True),
    Column("unit", Integer, primary_key=True, autoincrement=False),
    Column("num_samples", Integer, nullable=False),
    Column("num_tokens", BigInteger, nullable=False),
    Column("plan_sha256", String(64), nullable=False),
    # Its place in the order of the job's commits; null before. A unit that is captured again keeps it.
    Column("place", BigInteger),
    Index("unit_by_place", "job_id", "place", unique=True),
)

# What an attempt at a unit captures, kept until the unit is stored: the samples as planned, and after a
# commit as written, so that a unit lost with its host is not answered anew.
UNIT_PLAN = Table(
    "unit_plan",
    METADATA,
    Column("job_id", String(32), primary_key=True),
    Column("unit", Integer, primary_key=True, autoincrement=False),
    Column("content", LargeBinary, nullable=False),
    Column("sha256", String(64), nullable=False),
    Column("is_answered", Boolean, nullable=False, server_default=false()),
    ForeignKeyConstraint(["job_id", "unit"], ["unit.job_id", "unit.unit"], ondelete="CASCADE"),
)

TASK = Table(
    "task",
    METADATA,
    Column("job_id", ForeignKey("job.id"), primary_key=True),
    Column("kind", states(TaskKind), primary_key=True),
    # The unit of a capture, the host of a storing, the pass of a planning, the event of a webhook; else 0.
    Column("item", Integer, primary_key=True, autoincrement=False),
    # What only one lease of a kind may work on at a time: the repository of a publish.
    Column("subject", Text, nullable=False),
    Column("state", states(TaskState), nullable=False),
    # Counts the leases. Every write under a lease includes it, so that a later lease fences an earlier one.
    Column("epoch", Integer, nullable=False),
    Column("attempts", Integer, nullable=False),
    Column("deaths", Integer, nullable=False),
    Column("owner", Text),
    Column("lease_until", UtcTime),
    # The time of its last lease.
    Column("leased_at", UtcTime),
    Column("not_before", UtcTime),
    Column("problem", ShownDocument(Problem)),
    Column("lone_deaths", Document(LoneDeaths)),
    Index("task_by_state", "job_id", "kind", "state", "item"),
    Index("task_by_owner", "owner"),
)
_partial_index("publish_by_subject", TASK.c.subject, where=TASK.c.kind == TaskKind.PUBLISH)
_leased = TASK.c.state == TaskState.LEASED
_partial_index("task_by_subject", TASK.c.kind, TASK.c.subject, where=_leased, unique=True)

OPEN_WEBHOOK = text(f"kind = '{TaskKind.WEBHOOK}' AND state <> '{TaskState.DONE}'")
"""A condition on a task, for a partial index, as `AT_WORK`."""
_partial_index("open_webhook", TASK.c.kind, TASK.c.job_id, where=OPEN_WEBHOOK)

# Until when nothing is stored in a repository: commits are spaced out, or the Hub's rate limit was hit.
PAUSE = Table(
    "pause",
    METADATA,
    # A job's `publish_subject`.
    Column("subject", Text, primary_key=True),
    Column("until", UtcTime, nullable=False),
)

# Where files of units are before they are stored: the data folder or scratch, with an id kept in the folder.
HOST = Table(
    "host",
    METADATA,
    # `HOME` for the data folder; `SERVICE` is no folder, and has no id.
    Column("number", BigInteger().with_variant(Integer, "sqlite"), primary_key=True),
    # Null if the data folder was given up: another may take its place.
    Column("id", String(32), unique=True),
    # The name of the machine, for people.
    Column("name", Text, nullable=False),
    Column("seen_at", UtcTime, nullable=False),
    # Since when it has been seen without a gap.
    Column("there_since", UtcTime, nullable=False),
    # Its captured units run again elsewhere.
    Column("is_lost", Boolean, nullable=False, server_default=false()),
)

# The workers that capture. Each renews its row from time to time; any other worker removes an old one.
WORKER = Table(
    "worker",
    METADATA,
    Column("owner", String(255), primary_key=True),
    Column("host", BigInteger, nullable=False),
    Column("pid", BigInteger, nullable=False),
    Column("alive_until", UtcTime, nullable=False),
    Column("status", ShownDocument(WorkerStatus), nullable=False),
    # Why it takes no units of jobs whose shards are removed once stored.
    Column("waits", Text),
)

# A model on which a worker's engine died `deaths` times in a row: the worker has captured none of it since.
# With 0 deaths: a model that the worker could not get from the Hub.
SICKNESS = Table(
    "sickness",
    METADATA,
    Column("owner", ForeignKey("worker.owner", ondelete="CASCADE"), primary_key=True),
    Column("model_sha256", String(64), primary_key=True),
    # The model's name in the job of the last death. No foreign key: the job may be deleted.
    Column("model", Text, nullable=False),
    Column("job_id", String(32), nullable=False),
    Column("deaths", Integer, nullable=False),
    Column("problem", ShownDocument(Problem), nullable=False),
    # The worker takes no unit of the model before this time.
    Column("until", UtcTime, nullable=False),
)
OF_JOB = SICKNESS.c.model_sha256.in_((JOB.c.model_sha256, JOB.c.id))
"""True of a sickness from a job's model, or from the job alone, which a worker's engine refuses."""

UNIT_COMMIT = Table(
    "unit_commit",
    METADATA,
    Column("job_id", String(32), primary_key=True),
    Column("unit", Integer, primary_key=True, autoincrement=False),
    Column("epoch", Integer, nullable=False),
    # The host of its files until they are stored.
    Column("host", BigInteger, nullable=False),
    Column("provenance", Document(Provenance), nullable=False),
    Column("index_file", Document(FileEntry)),
    Column("num_tokens", BigInteger, nullable=False),
    Column("supervised_tokens", BigInteger, nullable=False),
    Column("checks", Document(UnitChecks), nullable=False),
    # Whether its files are in the job's repository, or were read by all consumers.
    Column("is_stored", Boolean, nullable=False, server_default=false()),
    # The size of its shards.
    Column("num_bytes", BigInteger, nullable=False),
    Column("committed_at", UtcTime, nullable=False),
    ForeignKeyConstraint(["job_id", "unit"], ["unit.job_id", "unit.unit"]),
)
_partial_index("unit_to_store", UNIT_COMMIT.c.job_id, where=~UNIT_COMMIT.c.is_stored)

# How often each token is supervised in a unit, packed (`schemas.dataset.token_counts`), until the job is
# published.
TOKEN_COUNTS = Table(
    "token_counts",
    METADATA,
    Column("job_id", String(32), primary_key=True),
    Column("unit", Integer, primary_key=True, autoincrement=False),
    Column("content", LargeBinary, nullable=False),
    ForeignKeyConstraint(["job_id", "unit"], ["unit.job_id", "unit.unit"]),
)

# The target's final norm at the job's first commit: a safetensors file of a few kB.
FINAL_NORM = Table(
    "final_norm",
    METADATA,
    Column("job_id", ForeignKey("job.id"), primary_key=True),
    Column("content", LargeBinary, nullable=False),
)

SHARD = Table(
    "shard",
    METADATA,
    Column("job_id", String(32), primary_key=True),
    Column("unit", Integer, primary_key=True, autoincrement=False),
    Column("path", String(255), primary_key=True),
    Column("entry", Document(ShardEntry), nullable=False),
    ForeignKeyConstraint(["job_id", "unit"], ["unit.job_id", "unit.unit"]),
)

REJECT = Table(
    "reject",
    METADATA,
    Column("job_id", ForeignKey("job.id"), primary_key=True),
    Column("position", BigInteger, primary_key=True, autoincrement=False),
    # The turn, if each turn of a conversation is a row; else 0.
    Column("turn", Integer, primary_key=True, autoincrement=False),
    # Null if rejected while planning, and so never a sample of a unit.
    Column("unit", Integer),
    Column("entry", ShownDocument(RejectView), nullable=False),
)

EVENT = Table(
    "event",
    METADATA,
    Column("job_id", ForeignKey("job.id"), primary_key=True),
    Column("id", BigInteger, primary_key=True, autoincrement=False),
    Column("entry", ShownDocument(Event), nullable=False),
)

# The readers of a job whose shards are removed once all have read them: each one's place and last sign of
# life.
CONSUMER = Table(
    "consumer",
    METADATA,
    Column("job_id", ForeignKey("job.id"), primary_key=True),
    Column("name", String(63), primary_key=True),
    Column("place", BigInteger, nullable=False),
    Column("seen_at", UtcTime, nullable=False),
    Column("expires_at", UtcTime),
)

API_KEY = Table(
    "api_key",
    METADATA,
    Column("id", String(16), primary_key=True),
    Column("name", String(63), nullable=False),
    Column("sha256", String(64), nullable=False),
    Column("grants", Document(Grants), nullable=False),
    Column("expires_at", UtcTime),
    Column("created_at", UtcTime, nullable=False),
    Column("revoked_at", UtcTime),
)

# The `Progress` counts of deleted jobs and lost hosts, so that the totals over all jobs never fall.
PAST = Table(
    "past",
    METADATA,
    Column("counter", String(32), primary_key=True),
    Column("number", BigInteger, nullable=False),
)

CANARY = Table(
    "canary",
    METADATA,
    Column("digest", Text, primary_key=True),
    Column("report", Text, nullable=False),
)
