"""The variables that settings are read from: one that is misspelt, or gives a field twice, is refused."""

import difflib
import os
from collections.abc import Iterable
from typing import Any

from pydantic.fields import FieldInfo
from pydantic_settings import EnvSettingsSource

from service.errors import OptionRefused, RequestError
from service.repeated_fields import check_fields

PREFIX = "QUARRY_"
"""How the names of settings begin in the environment."""


class Environment(EnvSettingsSource):
    """The environment, in whose JSON no object may have a field twice."""

    def decode_complex_value(self, field_name: str, field: FieldInfo, value: Any) -> Any:  # noqa: ANN401
        """Return the value of a variable. Raises ValueError; OptionRefused if a field is given twice."""
        decoded = super().decode_complex_value(field_name, field, value)
        try:
            check_fields(value.encode(), f"{PREFIX}{field_name.upper()}")
        except RequestError as twice:
            raise OptionRefused(twice.detail, field=f"{field_name}.{twice.field}", cure=twice.cure) from None
        return decoded


UNITS = ("_S", "_DAYS", "_BYTES", "_GIB")
"""How the names of settings with a unit end: too much of a short name to be near it without."""


def refuse_misspelt(settings: Iterable[str]) -> None:
    """Refuse a variable that is nearly a setting: without the one that was meant, more may be allowed."""
    known = {name.upper() for name in settings}
    for variable in os.environ:
        name = variable.upper().removeprefix(PREFIX)
        if name in known or not variable.upper().startswith(PREFIX):
            continue
        without_unit = [name + unit for unit in UNITS if name + unit in known]
        for near in without_unit or difflib.get_close_matches(name, known, n=1, cutoff=0.85):
            cure = f"did you mean {PREFIX}{near}?"
            raise OptionRefused(f"there is no setting {variable}", field=variable, cure=cure)
