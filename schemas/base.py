"""The pydantic base of every value that crosses a border: frozen, and an unknown field is an error."""

from typing import Any

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, ValidationError, model_validator
from pydantic_core import CoreSchema

MAX_FIELDS = 128
"""Most fields that one object, or one mapping in it, may be sent with; no value here has nearly as many."""


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


def first_fault(error: ValidationError) -> str:
    """Return the first thing that is wrong with a value, behind the place where it is."""
    first = error.errors(include_url=False, include_input=False)[0]
    parts = (*map(str, first["loc"]), first["msg"].removeprefix("Value error, "))
    return ".".join(parts[:-1]) + ": " * (len(parts) > 1) + parts[-1]
