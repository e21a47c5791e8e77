"""Migrates a database to the newest schema; any number of processes may do so at once."""

from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import ColumnElement, Select, Text, column, func, select, table

import service.migrations
from service.errors import VersionRefused
from service.store.database import Transaction

LOCK_KEY = 0x51554152
"""Key of the PostgreSQL advisory lock that serializes migrations ("QUAR")."""
VERSION = select(column("version_num", Text)).select_from(table("alembic_version"))


def check(tx: Transaction) -> None:
    """Compare the database's version with this code's. Raises VersionRefused."""
    _compare(MigrationContext.configure(tx.connection).get_current_revision())


def is_new(tx: Transaction) -> bool:
    """Return whether no service has created its tables in the database yet."""
    return MigrationContext.configure(tx.connection).get_current_revision() is None


def check_write(tx: Transaction) -> None:
    """Refuse to write if a newer service has migrated since this one started. Raises VersionRefused."""
    _compare(tx.connection.scalar(VERSION))


def check_behind_lock(tx: Transaction) -> None:
    """Do as `check_write`, and read the clock: a time of before a lock is as old as the wait for it."""
    found = tx.connection.execute(_version_and_time(tx.clock)).one_or_none()
    _compare(None if found is None else found.version_num)
    if found is not None:
        tx.now = found.now


@cache  # a store has one clock
def _version_and_time(clock: ColumnElement[datetime]) -> Select[Any]:
    return VERSION.add_columns(clock.label("now"))


def _compare(revision: str | None) -> None:
    if revision != versions()[0]:
        detail = f"the database is at version {revision}, this service at {versions()[0]}"
        cure = "restart the newest service; a database of before 0.2.0 is not read: give QUARRY_DATA_DIR and "
        raise VersionRefused(detail, cure=cure + "QUARRY_DATABASE_URL new ones")


@cache
def versions() -> tuple[str, ...]:
    """Return this service's version and those that it can migrate from, newest first."""
    return tuple(script.revision for script in ScriptDirectory.from_config(_config()).walk_revisions())


def _config() -> Config:
    config = Config()
    folder = Path(service.migrations.__file__).parent
    config.set_main_option("script_location", str(folder).replace("%", "%%"))
    return config


def migrate(tx: Transaction) -> None:
    """Run every missing migration; concurrent callers wait for that and then find nothing to do.

    Raises VersionRefused if the database was migrated by a newer service, or made before the first migration.
    """
    if tx.connection.dialect.name == "postgresql":
        tx.connection.execute(select(func.pg_advisory_xact_lock(LOCK_KEY)))
    revision = MigrationContext.configure(tx.connection).get_current_revision()
    if revision is not None and revision not in versions():
        _compare(revision)
    config = _config()
    config.attributes["connection"] = tx.connection
    command.upgrade(config, "head")
