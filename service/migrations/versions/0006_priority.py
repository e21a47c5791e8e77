"""A job's priority: whose tasks are leased first."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    """Add the column; every job begins at 0."""
    op.add_column("job", sa.Column("priority", sa.Integer(), server_default="0", nullable=False))
