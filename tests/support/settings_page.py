"""Writes `docs/settings.md`: python -m tests.support.settings_page."""

import json
from collections.abc import Iterator
from pathlib import Path

from pydantic.fields import FieldInfo

from service.settings import Settings

PAGE = Path(__file__).parents[2] / "docs" / "settings.md"
HEAD = """# Settings

Settings are environment variables. Lists and objects are JSON, such as
`QUARRY_SOURCE_ROOTS='["/data"]'`. Sizes are in bytes, times in seconds. An option of a command, such as
`quarry serve --data-dir`, overrides its variable.

`python -m tests.support.settings_page` makes this page from [service/settings.py](../service/settings.py).

| variable | default | meaning |
| --- | --- | --- |
"""
UNITS = {2**30: "GiB", 2**20: "MiB", 2**10: "KiB"}


def page() -> str:
    return HEAD + "".join(f"{line}\n" for line in _lines())


def _lines() -> Iterator[str]:
    for name, field in Settings.model_fields.items():
        meaning = " ".join((field.description or "").split()).replace("|", "\\|")
        yield f"| `QUARRY_{name.upper()}` | {_default(name, field)} | {meaning} |"


def _default(name: str, field: FieldInfo) -> str:
    value = field.default
    if value is None:
        return "unset"
    if isinstance(value, tuple | dict | bool):
        return f"`{json.dumps(value)}`"
    if name.endswith("_bytes"):
        size = next(size for size in UNITS if value % size == 0)
        return f"{value} ({value // size} {UNITS[size]})"
    return f"`{value}`" if isinstance(value, str | Path) else f"{value:g}"


if __name__ == "__main__":
    PAGE.write_text(page())
