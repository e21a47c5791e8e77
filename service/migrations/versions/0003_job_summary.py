"""A job's model and the kind of its source stand beside its state, so that listing jobs reads no requests."""

import json

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Add the columns, and fill them from the requests of the jobs that are there.

    One request is read at a time, since it may hold 64 MiB of samples. Neither database takes it apart:
    PostgreSQL's JSON functions refuse the escaped NUL characters that samples may hold.
    """
    op.add_column("job", sa.Column("model", sa.Text(), server_default="", nullable=False))
    op.add_column("job", sa.Column("source_kind", sa.String(length=16), server_default="", nullable=False))
    connection = op.get_bind()
    for job_id in connection.scalars(sa.text("SELECT job_id FROM request")).all():
        found = sa.text("SELECT body FROM request WHERE job_id = :job_id")
        body = json.loads(connection.execute(found, {"job_id": job_id}).scalar_one())
        connection.execute(
            sa.text("UPDATE job SET model = :model, source_kind = :source_kind WHERE id = :job_id"),
            {"model": body["model"], "source_kind": body["source"]["kind"], "job_id": job_id},
        )
