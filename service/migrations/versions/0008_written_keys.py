"""Which samples the runs of a schedule have written, and what their jobs left out."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    """Create the table and the columns; a schedule of before goes on taking all samples."""
    number = sa.BigInteger().with_variant(sa.Integer, "sqlite")
    op.create_table(
        "written_keys",
        sa.Column("schedule", number, primary_key=True, autoincrement=False),
        sa.Column("recipe", sa.String(64), primary_key=True),
        sa.Column("job_id", sa.String(32), primary_key=True),
        sa.Column("unit", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("content_keys", sa.LargeBinary, nullable=False),
    )
    op.add_column("job", sa.Column("schedule", number))
    for counter in ("samples_known", "samples_given_up"):
        op.add_column("job", sa.Column(counter, sa.BigInteger, nullable=False, server_default="0"))
    op.add_column("run", sa.Column("identity", sa.Text))
    op.execute("""UPDATE schedule SET rules = '{"samples":"all",' || substr(rules, 2)""")
