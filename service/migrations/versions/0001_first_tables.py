"""The first tables: jobs with their requests, units with what they became, events, leases and canaries."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Make the tables."""
    op.create_table(
        "canary",
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("report", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("key"),
    )
    op.create_table(
        "job",
        sa.Column("number", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("idempotency_key", sa.Text(), nullable=False),
        sa.Column("request_sha256", sa.String(length=64), nullable=False),
        sa.Column("publish_subject", sa.Text(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("plan_done", sa.Boolean(), nullable=False),
        sa.Column("samples_planned", sa.BigInteger(), nullable=False),
        sa.Column("samples_written", sa.BigInteger(), nullable=False),
        sa.Column("samples_rejected", sa.BigInteger(), nullable=False),
        sa.Column("tokens_planned", sa.BigInteger(), nullable=False),
        sa.Column("tokens_written", sa.BigInteger(), nullable=False),
        sa.Column("bytes_written", sa.BigInteger(), nullable=False),
        sa.Column("units_planned", sa.BigInteger(), nullable=False),
        sa.Column("units_done", sa.BigInteger(), nullable=False),
        sa.Column("units_failed", sa.BigInteger(), nullable=False),
        sa.Column("problem", sa.Text(), nullable=True),
        sa.Column("identity", sa.Text(), nullable=True),
        sa.Column("provenance", sa.Text(), nullable=True),
        sa.Column("hub_commit", sa.Text(), nullable=True),
        sa.Column("last_event", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("updated_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("number"),
        sa.UniqueConstraint("id"),
        sa.UniqueConstraint("idempotency_key"),
    )
    op.create_index("job_by_state", "job", ["state", "number"], unique=False)
    op.create_table(
        "event",
        sa.Column("job_id", sa.String(length=32), nullable=False),
        sa.Column("id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("entry", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(
            ["job_id"],
            ["job.id"],
        ),
        sa.PrimaryKeyConstraint("job_id", "id"),
    )
    op.create_table(
        "reject",
        sa.Column("job_id", sa.String(length=32), nullable=False),
        sa.Column("position", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("unit", sa.Integer(), nullable=True),
        sa.Column("entry", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(
            ["job_id"],
            ["job.id"],
        ),
        sa.PrimaryKeyConstraint("job_id", "position"),
    )
    op.create_table(
        "request",
        sa.Column("job_id", sa.String(length=32), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(
            ["job_id"],
            ["job.id"],
        ),
        sa.PrimaryKeyConstraint("job_id"),
    )
    op.create_table(
        "role_lease",
        sa.Column("role", sa.String(length=16), nullable=False),
        sa.Column("subject", sa.String(length=255), nullable=False),
        sa.Column("job_id", sa.String(length=32), nullable=False),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("owner", sa.Text(), nullable=True),
        sa.Column("lease_until", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["job_id"],
            ["job.id"],
        ),
        sa.PrimaryKeyConstraint("role", "subject"),
    )
    op.create_index("role_lease_by_job", "role_lease", ["job_id"], unique=False)
    op.create_table(
        "unit",
        sa.Column("job_id", sa.String(length=32), nullable=False),
        sa.Column("unit", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("owner", sa.Text(), nullable=True),
        sa.Column("lease_until", sa.DateTime(timezone=True), nullable=True),
        sa.Column("num_samples", sa.Integer(), nullable=False),
        sa.Column("num_tokens", sa.BigInteger(), nullable=False),
        sa.Column("plan_sha256", sa.String(length=64), nullable=False),
        sa.Column("problem", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(
            ["job_id"],
            ["job.id"],
        ),
        sa.PrimaryKeyConstraint("job_id", "unit"),
    )
    op.create_index("unit_by_state", "unit", ["job_id", "state", "unit"], unique=False)
    op.create_table(
        "shard",
        sa.Column("job_id", sa.String(length=32), nullable=False),
        sa.Column("unit", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("path", sa.String(length=255), nullable=False),
        sa.Column("entry", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(
            ["job_id", "unit"],
            ["unit.job_id", "unit.unit"],
        ),
        sa.PrimaryKeyConstraint("job_id", "unit", "path"),
    )
    op.create_table(
        "unit_commit",
        sa.Column("job_id", sa.String(length=32), nullable=False),
        sa.Column("unit", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("provenance", sa.Text(), nullable=False),
        sa.Column("index_file", sa.Text(), nullable=True),
        sa.Column("num_tokens", sa.BigInteger(), nullable=False),
        sa.Column("supervised_tokens", sa.BigInteger(), nullable=False),
        sa.Column("checks", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(
            ["job_id", "unit"],
            ["unit.job_id", "unit.unit"],
        ),
        sa.PrimaryKeyConstraint("job_id", "unit"),
    )
