"""A database of a released version is brought up by migrations: tables and states change in no other way."""

import json

from tests.frozen.tables import FROZEN, statements


def test_tables_change_by_a_new_migration_alone() -> None:
    frozen, today = json.loads(FROZEN.read_text()), statements()
    assert today == frozen, (
        f"write out the tables of {frozen['version']} in its migration, add one that changes them, "
        "or that makes earlier versions refuse new states, and freeze"
    )
