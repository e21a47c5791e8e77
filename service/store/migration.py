"""Bringing a database to the newest schema; any number of processes may do so at once."""

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import func, select

import service.migrations
from service.errors import StoreUnavailable
from service.store.database import Database

LOCK_KEY = 0x51554152
"""PostgreSQL's advisory lock that migrations take turns with ("QUAR")."""


def check(database: Database) -> None:
    """Compare the database's version with this code's. Raises StoreUnavailable."""
    with database.read() as tx:
        found = MigrationContext.configure(tx.connection).get_current_revision()
    wanted = ScriptDirectory.from_config(_config()).get_current_head()
    if found != wanted:
        raise StoreUnavailable(
            f"the database is at version {found}, this service at {wanted}", cure="restart the newest service"
        )


def _config() -> Config:
    config = Config()
    folder = Path(service.migrations.__file__).parent
    config.set_main_option("script_location", str(folder).replace("%", "%%"))
    return config


def migrate(database: Database) -> None:
    """Run every missing migration in one transaction; the others wait for its end and find nothing to do."""
    with database.write() as tx:
        if tx.connection.dialect.name == "postgresql":
            tx.connection.execute(select(func.pg_advisory_xact_lock(LOCK_KEY)))
        config = _config()
        config.attributes["connection"] = tx.connection
        command.upgrade(config, "head")
