"""Units' plans as the database holds them: read, and changed as nobody should."""

import hashlib

import pyarrow as pa
from sqlalchemy import select, update

from schemas.dataset.tables import read_plan_table
from service.store import Store
from service.store.tables import UNIT, UNIT_PLAN


def plan_content(store: Store, job_id: str, unit: int = 0) -> bytes:
    """Return the bytes of a plan that is still there."""
    of_unit = (UNIT_PLAN.c.job_id == job_id) & (UNIT_PLAN.c.unit == unit)
    with store.reading() as tx:
        content: bytes = tx.connection.scalars(select(UNIT_PLAN.c.content).where(of_unit)).one()
    return content


def plan_table(store: Store, job_id: str, unit: int = 0) -> pa.Table:
    """Return the samples of a plan that is still there."""
    return read_plan_table(pa.BufferReader(plan_content(store, job_id, unit)))


def replace_plan(store: Store, job_id: str, content: bytes, *, hashed: bool = True) -> None:
    """Change the plan of a job's first unit, and unless not `hashed` what the store says it hashes to."""
    of_plan = (UNIT_PLAN.c.job_id == job_id) & (UNIT_PLAN.c.unit == 0)
    of_unit = (UNIT.c.job_id == job_id) & (UNIT.c.unit == 0)
    with store.writing() as tx:
        tx.connection.execute(update(UNIT_PLAN).where(of_plan).values(content=content))
        if hashed:
            digest = hashlib.sha256(content).hexdigest()
            tx.connection.execute(update(UNIT_PLAN).where(of_plan).values(sha256=digest))
            tx.connection.execute(update(UNIT).where(of_unit).values(plan_sha256=digest))
