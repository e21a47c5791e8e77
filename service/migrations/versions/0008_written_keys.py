"""What the runs of a schedule have written, what their jobs left out; and sweeping as a task."""

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
    # Every job that rests is swept once more.
    op.execute(
        "INSERT INTO task (job_id, kind, item, subject, state, epoch, attempts, deaths)"
        " SELECT id, 'sweep', 0, id, 'pending', 0, 0, 0 FROM job"
        " WHERE state IN ('completed', 'failed', 'cancelled', 'blocked', 'paused')"
    )
