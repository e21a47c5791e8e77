"""Schedules, their requests, and what became of their slots."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    """Create the three tables."""
    number = sa.BigInteger().with_variant(sa.Integer, "sqlite")
    time = sa.DateTime(timezone=True)
    op.create_table(
        "schedule",
        sa.Column("number", number, primary_key=True),
        sa.Column("name", sa.String(63), nullable=False, unique=True),
        sa.Column("rules", sa.Text, nullable=False),
        sa.Column("paused", sa.Boolean, nullable=False),
        sa.Column("next_slot", time),
        sa.Column("waiting_slot", time),
        sa.Column("last_job", sa.String(32)),
        sa.Column("created_at", time, nullable=False),
        # A number is in the keys of its jobs, so none is given twice.
        sqlite_autoincrement=True,
    )
    op.create_table(
        "schedule_request",
        sa.Column("schedule", number, sa.ForeignKey("schedule.number"), primary_key=True),
        sa.Column("body", sa.Text, nullable=False),
    )
    op.create_table(
        "run",
        sa.Column("schedule", number, sa.ForeignKey("schedule.number"), primary_key=True),
        sa.Column("slot", time, primary_key=True),
        sa.Column("outcome", sa.String(16), nullable=False),
        sa.Column("at", time, nullable=False),
        sa.Column("detail", sa.Text),
        sa.Column("job_id", sa.String(32)),
        sa.Column("job_state", sa.String(16)),
        sa.Column("job_ended_at", time),
    )
    op.create_index("run_by_job", "run", ["job_id"])
