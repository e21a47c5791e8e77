"""A count of the workers that ended without a word while they held a unit."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Add the count; every unit begins at none."""
    op.add_column("unit", sa.Column("silent_deaths", sa.Integer(), server_default="0", nullable=False))
