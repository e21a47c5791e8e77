"""Reads what is stored of jobs and keys; what cannot be read is refused by the id of its job or key."""

from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError
from sqlalchemy import Column, Select
from sqlalchemy.engine import Row

from schemas.base import first_fault
from service.errors import QuarryError
from service.store.column_types import Document
from service.store.database import Transaction
from service.store.tables import JOB

DOCUMENTS = {column.name for column in JOB.c if isinstance(column.type, Document)}
"""Columns of a job that may hold what cannot be read."""


def rows_of(tx: Transaction, query: Select[Any], of_id: Column[str], what: str = "job") -> Sequence[Row[Any]]:
    """Return the rows that a query finds; `of_id` is the column that names a row's job, or `what` it is of.

    Raises QuarryError if one of them is damaged.
    """
    try:
        return tx.connection.execute(query).all()
    except ValidationError:
        for name in tx.connection.scalars(query.with_only_columns(of_id)).all():
            try:
                tx.connection.execute(query.where(of_id == name)).all()
            except ValidationError as error:
                raise _unreadable(what, name, error) from error
        raise  # it was deleted, or put right, meanwhile


def _unreadable(what: str, name: str, error: ValidationError) -> QuarryError:
    detail = f"what is stored of {what} {name} cannot be read: {first_fault(error)}"
    cure = "restore a backup of the database, or run the version of Quarry that wrote it"
    cure += "; a job that is not needed can be cancelled and deleted" if what == "job" else ""
    return QuarryError(detail, field=f"{what}_id", cure=cure)
