"""Finds the row of a schedule; one that is not there, or cannot be read, is refused by name."""

from typing import Any

from pydantic import ValidationError
from sqlalchemy import Select
from sqlalchemy.engine import RowMapping

from schemas.base import first_fault
from service.errors import NotFound, QuarryError
from service.store.database import Transaction
from service.store.schedule_tables import SCHEDULE

Which = int | str
"""A schedule's number, which is never reused, or its name, which another schedule may take at any time."""


def row_of(tx: Transaction, query: Select[Any], which: Which) -> RowMapping:
    """Return the one row that a query finds for a schedule. Raises NotFound; QuarryError if it is damaged."""
    is_it = SCHEDULE.c.name == which if isinstance(which, str) else SCHEDULE.c.number == which
    try:
        row = tx.connection.execute(query.where(is_it)).mappings().one_or_none()
    except ValidationError as error:
        of_it = query.with_only_columns(SCHEDULE.c.name).where(is_it)
        raise unreadable(tx.connection.scalars(of_it).one(), error) from error
    if row is None:
        raise unknown(which)
    return row


def unknown(which: Which) -> NotFound:
    """Return the error for a name of no schedule, or of none that the caller may see."""
    cure = "GET /schedules lists the schedules"
    return NotFound(f"there is no schedule {which!r}", field="name", cure=cure)


def unreadable(name: str, error: ValidationError) -> QuarryError:
    """Return the error for rules that are damaged, or of a later version."""
    detail = f"the stored rules of schedule {name!r} cannot be read: {first_fault(error)}"
    cure = (
        "run the version of Quarry that wrote them; or delete the schedule and add it again, which forgets "
    )
    cure += f"which samples it has captured: GET /schedules/{name}/request has its request"
    return QuarryError(detail, field="name", cure=cure)
