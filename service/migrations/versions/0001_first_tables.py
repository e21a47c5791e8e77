"""The first tables: those of the code. Before a second migration is added, they are written out here."""

from alembic import op

from service.store import schedule_tables  # noqa: F401 - which adds its own
from service.store.tables import METADATA

revision = "0.2.0"
down_revision = None


def upgrade() -> None:
    """Make the tables."""
    METADATA.create_all(op.get_bind())
