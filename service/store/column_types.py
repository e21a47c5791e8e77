"""Column types beyond the database's own: a value as JSON, a time in UTC, a state by its value."""

from datetime import UTC, datetime
from enum import StrEnum

from pydantic import BaseModel
from sqlalchemy import DateTime, Dialect, Enum, Text
from sqlalchemy.types import TypeDecorator

from schemas.base import Wire


class Document(TypeDecorator[BaseModel]):
    """A pydantic value as JSON. Text, since JSONB rejects the NUL characters that samples may contain."""

    impl = Text
    cache_ok = True

    def __init__(self, model: type[BaseModel]) -> None:
        super().__init__()
        self.model = model

    def process_bind_param(self, value: BaseModel | None, dialect: Dialect) -> str | None:
        """Return the JSON text, in which NUL and other control characters are escaped."""
        return None if value is None else value.model_dump_json()

    def process_result_value(self, value: str | None, dialect: Dialect) -> BaseModel | None:
        """Return the value, validated again."""
        return None if value is None else self.model.model_validate_json(value)


class ShownDocument(Document):
    """A document that is only shown. What a later version adds to it is left out, as by an older client.

    Its writer may be a newer worker on the same tables, or this service before a return to this version.
    """

    cache_ok = True

    def __init__(self, model: type[Wire]) -> None:
        super().__init__(model)
        self.model: type[Wire] = model

    def process_result_value(self, value: str | None, dialect: Dialect) -> Wire | None:
        """Return the value, validated again."""
        return None if value is None else self.model.answered(value.encode())


class UtcTime(TypeDecorator[datetime]):
    """An aware time in UTC. SQLite stores it without a time zone, PostgreSQL returns it in the session's."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Return the time in UTC."""
        return None if value is None else value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Return the time in UTC, aware."""
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


def states(kind: type[StrEnum]) -> Enum:
    """Return the type of a column that holds a member of this enum by its value."""
    return Enum(kind, native_enum=False, length=16, values_callable=lambda states: [s.value for s in states])
