"""The pydantic base of every value that crosses a border: frozen, and an unknown field is an error."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

MAX_FIELDS = 128
"""Most fields that one object may be sent with; no value here has nearly as many."""


def added(default: Any, **options: Any) -> Any:  # noqa: ANN401 - as `pydantic.Field`
    """Declare a field of a stored value that earlier versions did not have.

    It is not written out while it has its default, so that the text of a value, and each digest of it, stays
    what an earlier version wrote: an idempotency key goes on naming its job, a dataset its identity.
    """
    return Field(default=default, exclude_if=lambda value: value == default, **options)


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
