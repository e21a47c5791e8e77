"""Refuses JSON in which an object has a field twice."""

import json
from collections import Counter

from service.errors import RequestError

MAX_QUOTED_CHARS = 300
ONE_OF_THEM = "leave out all but one"


class _Twice(Exception):
    """An object has a field twice."""


def check_fields(raw: bytes, place: str) -> None:
    """Raise RequestError if an object in `raw` has a field twice: either value may be meant.

    JSON libraries take the last one without a word. `from_json` has read `raw`, so it is JSON that is not
    nested too deep for `json`.
    """

    def checked(pairs: list[tuple[str, object]]) -> None:  # keeps no value: a document may be large
        if len({name for name, _ in pairs}) < len(pairs):
            raise _Twice

    def marked(pairs: list[tuple[str, object]]) -> dict[str, object]:
        [(name, times)] = Counter(name for name, _ in pairs).most_common(1) or [("", 0)]
        return {name: _Twice} if times > 1 else dict(pairs)

    try:
        json.loads(raw.decode(), object_pairs_hook=checked)
    except _Twice:
        field = _marked_field(json.loads(raw.decode(), object_pairs_hook=marked))
        raise RequestError(f"{place} has several {field!r}", field=field, cure=ONE_OF_THEM) from None


def _marked_field(value: object) -> str | None:
    """Return the dotted path of the first field that is marked with `_Twice`."""
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for part, held in parts:
        name = clipped(str(part))
        if held is _Twice:
            return name
        if (below := _marked_field(held)) is not None:
            return f"{name}.{below}"
    return None


def clipped(text: str) -> str:
    """Return `text`, truncated if it is long: a message may quote input."""
    return text if len(text) <= MAX_QUOTED_CHARS else f"{text[:MAX_QUOTED_CHARS]}..."
