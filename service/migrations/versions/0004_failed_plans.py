"""Counts of a role's failures and of its holders that ended without a word, apart from its leases."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    """Add the counts; every role begins at none."""
    for name in ("failures", "silent_deaths"):
        op.add_column("role_lease", sa.Column(name, sa.Integer(), server_default="0", nullable=False))
