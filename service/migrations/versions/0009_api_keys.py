"""API keys, and who owns a job or a schedule."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    """Create the table and the columns; what there is belongs to nobody, so that admins alone see it."""
    op.create_table(
        "api_key",
        sa.Column("id", sa.String(16), primary_key=True),
        sa.Column("name", sa.String(63), nullable=False),
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.Column("grants", sa.Text, nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True)),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("revoked_at", sa.DateTime(timezone=True)),
    )
    for table in ("job", "schedule"):
        op.add_column(table, sa.Column("owner", sa.String(63)))
    op.create_index("job_by_owner", "job", ["owner", "number"])
