"""The tables of the newest migration, as both databases are told to make them, and the states in them.

`python -m tests.frozen.tables` freezes them anew, where a migration is new or before a release.
"""

import json
import sys
from pathlib import Path
from typing import Any

from sqlalchemy import Enum
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.schema import CreateIndex, CreateTable

from service.store import schedule_tables  # noqa: F401 - which adds its own
from service.store.migration import versions
from service.store.tables import METADATA

FROZEN = Path(__file__).with_name("tables.json")
DIALECTS = {"sqlite": sqlite.dialect(), "postgresql": postgresql.dialect()}


def statements() -> dict[str, Any]:
    """Return the version of the newest migration, the statements that make its tables, and its states.

    A version that does not know a state or kind can read no row that has it: a new one needs a migration, by
    which earlier versions refuse the database.
    """
    made: dict[str, Any] = {"version": versions()[0], "states": _states()}
    for name, dialect in DIALECTS.items():
        every = {}
        for table in METADATA.sorted_tables:
            every[table.name] = str(CreateTable(table).compile(dialect=dialect)).split()
            for index in sorted(table.indexes, key=lambda one: str(one.name)):
                every[str(index.name)] = str(CreateIndex(index).compile(dialect=dialect)).split()
        made[name] = {what: " ".join(words) for what, words in every.items()}
    return made


def _states() -> dict[str, list[str]]:
    """Return the values of each column that holds one of a few."""
    columns = (column for table in METADATA.sorted_tables for column in table.columns)
    return {str(column): column.type.enums for column in columns if isinstance(column.type, Enum)}


def main() -> int:
    """Write them; return 0."""
    FROZEN.write_text(json.dumps(statements(), indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
