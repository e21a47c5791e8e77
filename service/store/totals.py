"""The counters summed over all jobs: existing jobs, deleted ones, and units lost with their hosts."""

from collections.abc import Mapping

from sqlalchemy import func, select

from schemas.job import Progress
from service.store.database import Transaction
from service.store.tables import JOB, PAST


def keep(tx: Transaction, counts: Mapping[str, int]) -> None:
    """Add counts that no job has any more; these rows are locked after those of all jobs."""
    rows = [{"counter": name, "number": number} for name, number in sorted(counts.items()) if number]
    if rows:
        new = tx.insert(PAST).values(rows)
        more = {"number": PAST.c.number + new.excluded.number}
        tx.connection.execute(new.on_conflict_do_update(index_elements=["counter"], set_=more))


def totals(tx: Transaction) -> Progress:
    """Return the counters, none of which ever falls; `plan_done` is false."""
    # One statement, so that counts that move from a job to `past` meanwhile are counted once.
    columns = []
    for name in Progress.model_fields.keys() - {"plan_done"}:
        past = select(PAST.c.number).where(PAST.c.counter == name).scalar_subquery()
        columns.append((func.coalesce(func.sum(JOB.c[name]), 0) + func.coalesce(past, 0)).label(name))
    return Progress.model_validate(dict(tx.connection.execute(select(*columns)).mappings().one()))
