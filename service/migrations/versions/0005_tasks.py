"""One table of tasks in place of three kinds of leases: plans, units and publishing."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"

STATEMENTS = (
    # Every job has a plan, done or not. A role's lease is live while somebody owns it.
    """
    INSERT INTO task (job_id, kind, item, subject, state, epoch, attempts, deaths, owner, lease_until)
    SELECT job.id, 'plan', 0, job.id || '/0',
           CASE WHEN job.plan_done THEN 'done'
                WHEN role.owner IS NOT NULL AND job.state = 'running' THEN 'leased' ELSE 'pending' END,
           COALESCE(role.epoch, 0),
           COALESCE(role.failures, 0)
             + CASE WHEN role.owner IS NOT NULL AND job.state = 'running' THEN 1 ELSE 0 END,
           COALESCE(role.silent_deaths, 0),
           CASE WHEN job.state = 'running' AND NOT job.plan_done THEN role.owner END,
           CASE WHEN job.state = 'running' AND NOT job.plan_done THEN role.lease_until END
    FROM job LEFT JOIN role_lease AS role ON role.role = 'plan' AND role.job_id = job.id
    """,
    """
    INSERT INTO task (job_id, kind, item, subject, state, epoch, attempts, deaths, owner, lease_until,
                      problem)
    SELECT job_id, 'capture', unit, job_id || '/' || unit, state, epoch, attempts, silent_deaths,
           owner, lease_until, problem
    FROM unit
    """,
    # Jobs whose units are all captured. A repository's lease names the one of them that is published.
    """
    INSERT INTO task (job_id, kind, item, subject, state, epoch, attempts, deaths, owner, lease_until)
    SELECT job.id, 'publish', 0, job.publish_subject,
           CASE WHEN job.state = 'completed' THEN 'done'
                WHEN role.owner IS NOT NULL AND job.state = 'publishing' THEN 'leased' ELSE 'pending' END,
           COALESCE(role.epoch, 0),
           CASE WHEN role.owner IS NOT NULL AND job.state = 'publishing' THEN 1 ELSE 0 END,
           COALESCE(role.silent_deaths, 0),
           CASE WHEN job.state = 'publishing' THEN role.owner END,
           CASE WHEN job.state = 'publishing' THEN role.lease_until END
    FROM job LEFT JOIN role_lease AS role ON role.role = 'publish' AND role.job_id = job.id
    WHERE job.plan_done AND job.units_done = job.units_planned
    """,
)


def upgrade() -> None:
    """Make the table, fill it with the work of the jobs that are there, and drop what it replaces."""
    op.create_table(
        "task",
        sa.Column("job_id", sa.String(length=32), sa.ForeignKey("job.id"), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("item", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("subject", sa.Text(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("deaths", sa.Integer(), nullable=False),
        sa.Column("owner", sa.Text()),
        sa.Column("lease_until", sa.DateTime(timezone=True)),
        sa.Column("not_before", sa.DateTime(timezone=True)),
        sa.Column("problem", sa.Text()),
        sa.PrimaryKeyConstraint("job_id", "kind", "item"),
    )
    op.create_index("task_by_state", "task", ["job_id", "kind", "state", "item"])
    op.create_index("task_by_owner", "task", ["owner"])
    for statement in STATEMENTS:
        op.execute(statement)
    leased = sa.text("state = 'leased'")
    op.create_index(
        "task_by_subject",
        "task",
        ["kind", "subject"],
        unique=True,
        sqlite_where=leased,
        postgresql_where=leased,
    )
    op.drop_table("role_lease")
    op.drop_index("unit_by_state", "unit")
    for name in ("state", "epoch", "attempts", "silent_deaths", "owner", "lease_until", "problem"):
        op.drop_column("unit", name)
