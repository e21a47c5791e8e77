"""Canary reports, one a combination of model, layers and engine, so that a passed one is not run again."""

from sqlalchemy import select

from service.store.database import Transaction
from service.store.tables import CANARY


def report(tx: Transaction, digest: str) -> str | None:
    """Return the report stored under `digest`."""
    report: str | None = tx.connection.scalar(select(CANARY.c.report).where(CANARY.c.digest == digest))
    return report


def record(tx: Transaction, digest: str, report_json: str) -> None:
    """Store a report, in place of an older one."""
    new = tx.insert(CANARY).values(digest=digest, report=report_json)
    tx.connection.execute(new.on_conflict_do_update(index_elements=["digest"], set_={"report": report_json}))
