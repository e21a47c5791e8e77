"""The pydantic base of every value that crosses a border: frozen, and an unknown field is an error."""

from pydantic import BaseModel, ConfigDict


class Wire(BaseModel):
    """Immutable; refuses unknown fields, so that a misspelt option is an error and not a shrug."""

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="constants")
