"""Bringing a database to the newest schema; any number of processes may do so at once."""

from functools import cache
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Text, column, func, select, table

import service.migrations
from service.errors import VersionRefused
from service.store.database import Transaction

LOCK_KEY = 0x51554152
"""PostgreSQL's advisory lock that migrations take turns with ("QUAR")."""
VERSION = select(column("version_num", Text)).select_from(table("alembic_version"))


def check(tx: Transaction) -> None:
    """Compare the database's version with this code's. Raises VersionRefused."""
    _compare(MigrationContext.configure(tx.connection).get_current_revision())


def check_write(tx: Transaction) -> None:
    """Refuse a write where a newer service has migrated since this one began. Raises VersionRefused."""
    _compare(tx.connection.scalar(VERSION))


def _compare(revision: str | None) -> None:
    if revision != _newest():
        detail = f"the database is at version {revision}, this service at {_newest()}"
        raise VersionRefused(detail, cure="restart the newest service")


@cache
def _newest() -> str:
    return str(ScriptDirectory.from_config(_config()).get_current_head())


def _config() -> Config:
    config = Config()
    folder = Path(service.migrations.__file__).parent
    config.set_main_option("script_location", str(folder).replace("%", "%%"))
    return config


def migrate(tx: Transaction) -> None:
    """Run every missing migration; the others wait for its end and find nothing to do.

    Raises VersionRefused where a newer service has migrated.
    """
    if tx.connection.dialect.name == "postgresql":
        tx.connection.execute(select(func.pg_advisory_xact_lock(LOCK_KEY)))
    revision = MigrationContext.configure(tx.connection).get_current_revision()
    if revision is not None and revision > _newest():
        _compare(revision)
    config = _config()
    config.attributes["connection"] = tx.connection
    command.upgrade(config, "head")
