"""The tables of schedules: their rules, the outcome of each slot, and the samples their runs captured."""

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    String,
    Table,
    Text,
)

from schemas.identity import Identity
from schemas.job import JobState
from schemas.schedule import RunOutcome, ScheduleRules
from service.store.column_types import Document, UtcTime, states
from service.store.tables import METADATA

SCHEDULE = Table(
    "schedule",
    METADATA,
    # Random, so that no other database on the same data folder, nor this one later, assigns it again.
    Column("number", BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=False),
    Column("name", String(63), nullable=False, unique=True),
    Column("owner", String(63)),
    Column("rules", Document(ScheduleRules), nullable=False),
    Column("paused", Boolean, nullable=False),
    # The first slot that is not decided yet; null after the last.
    Column("next_slot", UtcTime),
    # A slot that is due and waits for the last job to end.
    Column("waiting_slot", UtcTime),
    Column("last_job", String(32)),
    Column("created_at", UtcTime, nullable=False),
)

# Numbers of deleted schedules: whatever is still posted to them is removed.
DELETED_SCHEDULE = Table(
    "deleted_schedule",
    METADATA,
    Column("number", BigInteger, primary_key=True, autoincrement=False),
    Column("deleted_at", UtcTime, nullable=False),
)

SCHEDULE_REQUEST = Table(
    "schedule_request",
    METADATA,
    Column("schedule", ForeignKey("schedule.number"), primary_key=True),
    Column("body", Text, nullable=False),
)

RUN = Table(
    "run",
    METADATA,
    Column("schedule", ForeignKey("schedule.number"), primary_key=True),
    Column("slot", UtcTime, primary_key=True),
    Column("outcome", states(RunOutcome), nullable=False),
    Column("at", UtcTime, nullable=False),
    Column("detail", Text),
    # No foreign key: a job may be deleted. Its final state and identity are kept then.
    Column("job_id", String(32)),
    Column("job_state", states(JobState)),
    Column("job_ended_at", UtcTime),
    Column("identity", Document(Identity)),
    Index("run_by_job", "job_id"),
)

# The hashes of a unit's samples, 16 bytes each. They outlive the job, so that its samples are not captured
# again.
CAPTURED_SAMPLES = Table(
    "captured_samples",
    METADATA,
    Column("schedule", BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=False),
    Column("recipe", String(64), primary_key=True),
    Column("job_id", String(32), primary_key=True),
    Column("unit", Integer, primary_key=True, autoincrement=False),
    Column("content_hashes", LargeBinary, nullable=False),
    Index("captured_sample_by_job", "schedule", "job_id", "recipe"),
)
