"""The pydantic base of every value that crosses a boundary: frozen, and unknown fields are errors."""

from collections.abc import Callable
from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    AwareDatetime,
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    ValidationInfo,
    model_validator,
)
from pydantic_core import CoreSchema, ValidationError, core_schema

MAX_FIELDS = 128
"""Most fields of an object, or of a mapping directly in it; no class here has nearly as many."""

Count = Annotated[int, Field(ge=0, lt=2**63)]
"""A number of things, or one of them: a float can hold it, and so can other languages' integers."""

_OF_ANOTHER_VERSION = object()
"""The context in which `Wire.answered` validates."""


def _end_at_first_fault(schema: Any) -> None:  # noqa: ANN401 - pydantic's, of nested dicts and lists
    if isinstance(schema, dict):
        if schema.get("type") in ("list", "tuple"):
            schema["fail_fast"] = True
        schema = schema.values()
    elif not isinstance(schema, list):
        return
    for part in schema:
        _end_at_first_fault(part)


class Wire(BaseModel):
    """Immutable; refuses unknown fields, so that a misspelt option is an error and is not silently ignored.

    Only the first fault in a list is reported: at a kilobyte of memory each, all of them would take a
    thousand times what was sent.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="constants")

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:  # noqa: ANN401
        """Make every list in the schema fail fast."""
        schema = handler(source)
        _end_at_first_fault(schema)
        return schema

    @model_validator(mode="before")
    @classmethod
    def _few_fields(cls, data: Any) -> Any:  # noqa: ANN401 - whatever was sent
        """Refuse an object of countless unknown fields at once.

        Each would become a separate error object.
        """
        if isinstance(data, dict):
            for held in (data, *data.values()):
                if isinstance(held, dict) and len(held) > MAX_FIELDS:
                    raise ValueError(f"{len(held)} fields; at most {MAX_FIELDS} can be given")
        return data

    @classmethod
    def answered(cls, content: bytes) -> Self:
        """Read JSON from a service that may be newer: drop unknown fields and keep unknown `OpenEnum` values.

        Raises ValidationError.
        """
        return cls.model_validate_json(content, extra="ignore", context=_OF_ANOTHER_VERSION)


class OpenEnum(StrEnum):
    """An enum that later versions may extend: an unknown name in an answer is kept as it is.

    A request with such a name is refused.
    """

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:  # noqa: ANN401
        """Let `Wire.answered` keep an unknown name."""
        return core_schema.with_info_wrap_validator_function(cls._known_or_kept, handler(source))

    @classmethod
    def _known_or_kept(cls, name: Any, known: Callable[[Any], Any], info: ValidationInfo) -> Any:  # noqa: ANN401
        try:
            return known(name)
        except ValidationError:
            if info.context is not _OF_ANOTHER_VERSION or not isinstance(name, str):
                raise
        return cls.kept(name)

    @classmethod
    def kept(cls, name: str) -> Self:
        """Return the member with a name, or what stands for one that this version does not know."""
        if name in cls._value2member_map_:
            return cls(name)
        kept = str.__new__(cls, name)
        kept._name_ = kept._value_ = name
        return kept


def _in_utc(at: datetime) -> datetime:
    try:
        at.astimezone(UTC)
    except OverflowError as error:
        raise ValueError("in UTC it is outside the years 1 to 9999") from error
    return at


Moment = Annotated[AwareDatetime, AfterValidator(_in_utc)]
"""A time with a zone that a database can hold in UTC."""


def first_fault(error: ValidationError) -> str:
    """Return the first fault in a value, prefixed with its location."""
    first = error.errors(include_url=False, include_input=False)[0]
    parts = (*map(str, first["loc"]), first["msg"].removeprefix("Value error, "))
    return ".".join(parts[:-1]) + ": " * (len(parts) > 1) + parts[-1]
