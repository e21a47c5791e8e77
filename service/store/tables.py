"""The tables: a column for what a statement decides on or orders by, a JSON document for what is read whole.

A job's request stands in its own table: it may hold 8 MiB of inline samples, and SQLite writes a whole row
anew at every change of a counter beside it.
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
from service.store.column_types import Document, UtcTime, states
from service.store.values import LoneDeaths, TaskKind, TaskState

METADATA = MetaData()

AT_WORK_STATES = frozenset({JobState.QUEUED, JobState.RUNNING, JobState.PUBLISHING})
AT_WORK = text("state IN ({})".format(", ".join(f"'{state.value}'" for state in sorted(AT_WORK_STATES))))
"""Of a job. A partial index is used where a query says its condition word for word."""


def _partial_index(
    name: str, *columns: ColumnElement[Any], where: ColumnElement[bool] | TextClause, unique: bool = False
) -> None:
    """Add an index of the rows of a table for which a condition holds."""
    Index(name, *columns, unique=unique, sqlite_where=where, postgresql_where=where)


JOB = Table(
    "job",
    METADATA,
    # The order of submission. SQLite numbers only a column of the type INTEGER by itself.
    Column("number", BigInteger().with_variant(Integer, "sqlite"), primary_key=True),
    Column("id", String(32), nullable=False, unique=True),
    Column("request_sha256", String(64), nullable=False),
    # Of its owner's `max_bytes`, until it is deleted.
    Column("request_bytes", BigInteger, nullable=False),
    Column("publish_subject", Text, nullable=False),
    # Of the request, for what is said of many jobs at once.
    Column("model", Text, nullable=False),
    Column("source_kind", String(16), nullable=False),
    Column("skips_canary", Boolean, nullable=False),
    Column("keeps_local", Boolean, nullable=False),
    # Where its ends are reported.
    Column("webhook", Text),
    Column("priority", Integer, nullable=False),
    # The schedule whose earlier runs' samples the job leaves out. No foreign key: it may be deleted.
    Column("schedule", BigInteger().with_variant(Integer, "sqlite")),
    # The schedule whose posted samples the job takes, until that is deleted.
    Column("spool", BigInteger().with_variant(Integer, "sqlite")),
    # The name of the key that made it; null: the operator.
    Column("owner", String(63)),
    Column("state", states(JobState), nullable=False),
    *(
        Column(name, Boolean if name == "plan_done" else BigInteger, nullable=False)
        for name in Progress.model_fields
    ),
    Column("problem", Document(Problem)),
    Column("identity", Document(Identity)),
    # What the identity says of the model, by which a worker's engine rests.
    Column("model_sha256", String(64)),
    Column("provenance", Document(Provenance)),
    Column("hub_commit", Text),
    # Where the last pass over its source begins.
    Column("pass_unit", BigInteger, nullable=False, server_default="0"),
    Column("pass_position", BigInteger, nullable=False, server_default="0"),
    # When its last unit so far was committed, or its plan was done without one.
    Column("captured_at", UtcTime),
    # Of a job that is deleted: whether its dataset in the data folder is deleted with it.
    Column("deletes_dataset", Boolean, nullable=False, server_default=false()),
    Column("last_event", BigInteger, nullable=False),
    Column("created_at", UtcTime, nullable=False),
    Column("updated_at", UtcTime, nullable=False),
    Index("job_by_state", "state", "number"),
    Index("job_by_owner", "owner", "number"),
)
_partial_index("job_by_priority", JOB.c.priority.desc(), JOB.c.number, where=AT_WORK)

# What a client calls a submission. It outlives the job as a tombstone: the same key never names another job.
SUBMISSION = Table(
    "submission",
    METADATA,
    # As of a job, and empty for the operator: null is equal to nothing.
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
    # In the order of the job's commits, null before. An attempt that comes again keeps it.
    Column("place", BigInteger),
    Index("unit_by_place", "job_id", "place", unique=True),
)

# What an attempt at a unit captures, until the unit is stored: the samples as planned, after a commit as they
# were written, so that a unit that is lost with its host answers nothing anew.
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
    # The unit of a capture, the host of a storing; 0 for every other kind.
    Column("item", Integer, primary_key=True, autoincrement=False),
    # What only one lease of a kind may work on: the repository of a publish.
    Column("subject", Text, nullable=False),
    Column("state", states(TaskState), nullable=False),
    # Counts the leases. Every write of a lease carries it, so that a later lease fences an earlier one.
    Column("epoch", Integer, nullable=False),
    Column("attempts", Integer, nullable=False),
    Column("deaths", Integer, nullable=False),
    Column("owner", Text),
    Column("lease_until", UtcTime),
    # Of its last lease.
    Column("leased_at", UtcTime),
    Column("not_before", UtcTime),
    Column("problem", Document(Problem)),
    Column("lone_deaths", Document(LoneDeaths)),
    Index("task_by_state", "job_id", "kind", "state", "item"),
    Index("task_by_owner", "owner"),
)
_partial_index("publish_by_subject", TASK.c.subject, where=TASK.c.kind == TaskKind.PUBLISH)
_leased = TASK.c.state == TaskState.LEASED
_partial_index("task_by_subject", TASK.c.kind, TASK.c.subject, where=_leased, unique=True)

OPEN_WEBHOOK = text(f"kind = '{TaskKind.WEBHOOK}' AND state <> '{TaskState.DONE}'")
"""Of a task: the condition of a partial index, as `AT_WORK`."""
_partial_index("open_webhook", TASK.c.kind, TASK.c.job_id, where=OPEN_WEBHOOK)

# Until when nothing is committed ahead to a repository: commits stand apart, or the Hub was asked too often.
PAUSE = Table(
    "pause",
    METADATA,
    # As of a job.
    Column("subject", Text, primary_key=True),
    Column("until", UtcTime, nullable=False),
)

# Where files of units lie before they are stored: the data folder or scratch, by an id that is kept in it.
HOST = Table(
    "host",
    METADATA,
    # `HOME` is the data folder's.
    Column("number", BigInteger().with_variant(Integer, "sqlite"), primary_key=True),
    # Null once the data folder was given up: another may take its place.
    Column("id", String(32), unique=True),
    # What people call it: the name of a machine.
    Column("name", Text, nullable=False),
    Column("seen_at", UtcTime, nullable=False),
    # Since when it was seen without a gap.
    Column("there_since", UtcTime, nullable=False),
    # Its captured units run again elsewhere.
    Column("is_lost", Boolean, nullable=False, server_default=false()),
)

# The workers that capture. Each says from time to time that it is there; an old row is removed by any other.
WORKER = Table(
    "worker",
    METADATA,
    Column("owner", String(255), primary_key=True),
    Column("host", BigInteger, nullable=False),
    Column("pid", BigInteger, nullable=False),
    Column("alive_until", UtcTime, nullable=False),
    Column("status", Document(WorkerStatus), nullable=False),
    # Why it takes no unit of jobs whose shards go when they are stored.
    Column("waits", Text),
)

# What a worker's engine dies over, in `deaths` one after another: the worker has captured none of it since.
SICKNESS = Table(
    "sickness",
    METADATA,
    Column("owner", ForeignKey("worker.owner", ondelete="CASCADE"), primary_key=True),
    Column("model_sha256", String(64), primary_key=True),
    # What the job of the last death calls it; no foreign key: the job may be deleted.
    Column("model", Text, nullable=False),
    Column("job_id", String(32), nullable=False),
    Column("deaths", Integer, nullable=False),
    Column("problem", Document(Problem), nullable=False),
    # The worker takes no unit of the model before.
    Column("until", UtcTime, nullable=False),
)

UNIT_COMMIT = Table(
    "unit_commit",
    METADATA,
    Column("job_id", String(32), primary_key=True),
    Column("unit", Integer, primary_key=True, autoincrement=False),
    Column("epoch", Integer, nullable=False),
    # Where its files are until they are stored.
    Column("host", BigInteger, nullable=False),
    Column("provenance", Document(Provenance), nullable=False),
    Column("index_file", Document(FileEntry)),
    Column("num_tokens", BigInteger, nullable=False),
    Column("supervised_tokens", BigInteger, nullable=False),
    Column("checks", Document(UnitChecks), nullable=False),
    # Whether its files are where they go: in the job's repository, or with all consumers.
    Column("is_stored", Boolean, nullable=False, server_default=false()),
    # Of its shards.
    Column("num_bytes", BigInteger, nullable=False),
    Column("committed_at", UtcTime, nullable=False),
    ForeignKeyConstraint(["job_id", "unit"], ["unit.job_id", "unit.unit"]),
)
_partial_index("unit_to_store", UNIT_COMMIT.c.job_id, where=~UNIT_COMMIT.c.is_stored)

# How often each token is supervised in a unit, as a `token_freq` file says it, until the job is published.
TOKEN_COUNTS = Table(
    "token_counts",
    METADATA,
    Column("job_id", String(32), primary_key=True),
    Column("unit", Integer, primary_key=True, autoincrement=False),
    Column("content", LargeBinary, nullable=False),
    ForeignKeyConstraint(["job_id", "unit"], ["unit.job_id", "unit.unit"]),
)

# The target's final norm as the engine of the job's first commit had it: a safetensors file of some kB.
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
    # Of a conversation whose turns are rows; else 0.
    Column("turn", Integer, primary_key=True, autoincrement=False),
    # Null: rejected while planning, so never a sample of a unit.
    Column("unit", Integer),
    Column("entry", Document(RejectView), nullable=False),
)

EVENT = Table(
    "event",
    METADATA,
    Column("job_id", ForeignKey("job.id"), primary_key=True),
    Column("id", BigInteger, primary_key=True, autoincrement=False),
    Column("entry", Document(Event), nullable=False),
)

# Who reads a job whose shards go once all of them have read them: up to a place, and since when it is silent.
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

# What deleted jobs and lost hosts had counted of `Progress`, so that the totals of all jobs never fall.
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
