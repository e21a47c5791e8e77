"""The pydantic base of every value that crosses a border: frozen, and an unknown field is an error."""

from collections.abc import Callable
from enum import StrEnum
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, ValidationInfo, model_validator
from pydantic_core import CoreSchema, ValidationError, core_schema

MAX_FIELDS = 128
"""Most fields that one object, or one mapping in it, may be sent with; no value here has nearly as many."""


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
    """Immutable; refuses unknown fields, so that a misspelt option is an error and not a shrug.

    Of a list the first fault is told alone: a kilobyte of memory for each would be a thousand times what was
    sent.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="constants")

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:  # noqa: ANN401
        """Let every list in it end at its first fault."""
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
        """Read the JSON of a service that may be newer: leave out fields, and keep values of an `OpenEnum`.

        Raises ValidationError.
        """
        return cls.model_validate_json(content, extra="ignore", context=_OF_ANOTHER_VERSION)


class OpenEnum(StrEnum):
    """Names that a later version may add to: an answer's unknown name is a member of no other name.

    A request with such a name is refused.
    """

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:  # noqa: ANN401
        """Let `Wire.answered` keep a name that is not known."""
        return core_schema.with_info_wrap_validator_function(cls._known_or_kept, handler(source))

    @classmethod
    def _known_or_kept(cls, name: Any, known: Callable[[Any], Any], info: ValidationInfo) -> Any:  # noqa: ANN401
        try:
            return known(name)
        except ValidationError:
            if info.context is not _OF_ANOTHER_VERSION or not isinstance(name, str):
                raise
        kept = str.__new__(cls, name)
        kept._name_ = kept._value_ = name
        return kept


def first_fault(error: ValidationError) -> str:
    """Return the first thing that is wrong with a value, behind the place where it is."""
    first = error.errors(include_url=False, include_input=False)[0]
    parts = (*map(str, first["loc"]), first["msg"].removeprefix("Value error, "))
    return ".".join(parts[:-1]) + ": " * (len(parts) > 1) + parts[-1]
