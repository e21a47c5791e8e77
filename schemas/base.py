"""The pydantic base of every value that crosses a border: frozen, and an unknown field is an error."""

from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

MAX_FIELDS = 128
"""Most fields that one object may be sent with; no value here has nearly as many."""


class Wire(BaseModel):
    """Immutable; refuses unknown fields, so that a misspelt option is an error and not a shrug."""

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="constants")

    @model_validator(mode="before")
    @classmethod
    def _few_fields(cls, data: Any) -> Any:  # noqa: ANN401 - whatever was sent
        """Refuse an object of countless unknown fields at once.

        Each would become a separate error object.
        """
        if isinstance(data, dict) and len(data) > MAX_FIELDS:
            raise ValueError(f"{len(data)} fields; at most {MAX_FIELDS} can be given")
        return data


def first_fault(error: ValidationError) -> str:
    """Return the first thing that is wrong with a value, behind the place where it is."""
    first = error.errors(include_url=False, include_input=False)[0]
    parts = (*map(str, first["loc"]), first["msg"].removeprefix("Value error, "))
    return ".".join(parts[:-1]) + ": " * (len(parts) > 1) + parts[-1]
