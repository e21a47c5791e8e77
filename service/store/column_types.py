"""What a column holds beside the database's own types: a value as JSON, a time in UTC, a state by name."""

from datetime import UTC, datetime
from enum import StrEnum

from pydantic import BaseModel
from sqlalchemy import DateTime, Dialect, Enum, Text
from sqlalchemy.types import TypeDecorator


class Document(TypeDecorator[BaseModel]):
    """A pydantic value as its JSON. Text, since JSONB refuses the NUL characters that samples may hold."""

    impl = Text
    cache_ok = True

    def __init__(self, model: type[BaseModel]) -> None:
        """Store values of `model`."""
        super().__init__()
        self.model = model

    def process_bind_param(self, value: BaseModel | None, dialect: Dialect) -> str | None:
        """Return the JSON text; NUL and other control characters are escaped in it."""
        return None if value is None else value.model_dump_json()

    def process_result_value(self, value: str | None, dialect: Dialect) -> BaseModel | None:
        """Return the value, checked against its contract again."""
        return None if value is None else self.model.model_validate_json(value)


class UtcTime(TypeDecorator[datetime]):
    """An aware time in UTC. SQLite stores it without its zone, PostgreSQL answers in the session's."""

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
    """Return the type of a column that holds one of these by its value."""
    return Enum(kind, native_enum=False, length=16, values_callable=lambda states: [s.value for s in states])
