"""What all jobs together have counted: those that are there, those that were deleted, and what was lost."""

from collections.abc import Mapping

from sqlalchemy import func, select

from schemas.job import Progress
from service.store.database import Transaction
from service.store.tables import JOB, PAST


def keep(tx: Transaction, counts: Mapping[str, int]) -> None:
    """Go on counting what no job counts any more; the rows are locked behind those of all jobs."""
    rows = [{"counter": name, "number": number} for name, number in sorted(counts.items()) if number]
    if rows:
        new = tx.insert(PAST).values(rows)
        more = {"number": PAST.c.number + new.excluded.number}
        tx.connection.execute(new.on_conflict_do_update(index_elements=["counter"], set_=more))


def totals(tx: Transaction) -> Progress:
    """Return the counters, none of which ever falls; `plan_done` is false."""
    names = [name for name in Progress.model_fields if name != "plan_done"]
    # One statement: what moves from a job to the past meanwhile is counted once.
    past = {name: select(PAST.c.number).where(PAST.c.counter == name).scalar_subquery() for name in names}
    columns = [
        (func.coalesce(func.sum(JOB.c[name]), 0) + func.coalesce(past[name], 0)).label(name) for name in names
    ]
    return Progress.model_validate(dict(tx.connection.execute(select(*columns)).mappings().one()))
