"""Connections and transactions: the settings with which the same statements are correct on both databases.

On SQLite a write transaction holds the database's one write lock from its start. On PostgreSQL it first locks
one job's row (`transitions.lock_job`), or several in the order of their numbers, and rows of `task`, `past`,
`worker` (in the order of their owners), `sickness`, `host` and `consumer` (in the order of jobs and names)
last, so that transactions cannot deadlock.

A read transaction sees one snapshot of the database on both. A write transaction on PostgreSQL must see what
was committed while it waited for a lock, and so has no snapshot.
"""

import os
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import psycopg
from sqlalchemy import (
    URL,
    ColumnElement,
    Connection,
    Dialect,
    Engine,
    Table,
    create_engine,
    event,
    literal_column,
    make_url,
    select,
    text,
    type_coerce,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import (
    ArgumentError,
    DatabaseError,
    DBAPIError,
    OperationalError,
    TimeoutError as PoolTimeout,
)
from sqlalchemy.pool import ConnectionPoolEntry

from schemas.dataset.seal import make_folder
from service.errors import DiskFull, OptionRefused, StoreUnavailable
from service.store.column_types import UtcTime

P = ParamSpec("P")
R = TypeVar("R")

URLS = "use sqlite:////path/quarry.db or postgresql+psycopg://user@host/name"
DRIVERS = ("sqlite", "postgresql", "postgresql+psycopg")

WAIT_MS = 30_000
"""How long a statement waits for a lock; on PostgreSQL also how long a stopped process may hold one."""
SILENCE = {
    "connect_timeout": "10",
    "keepalives_idle": "30",
    "keepalives_interval": "10",
    "keepalives_count": "3",
    "tcp_user_timeout": "60000",
}
"""Parameters of libpq with which a broken network is noticed within a minute, not TCP's 15 minutes."""
WRITABLE = {"target_session_attrs": "read-write"}
"""Another one: connects only to a server that takes writes, never to a standby that answers in its place."""
READ_ONLY_STATES = ("25006", "0A000")
"""SQLSTATEs of a server that takes no writes: within a transaction, and at its start."""


CLOCKS = {
    "sqlite": "strftime('%Y-%m-%d %H:%M:%f000', 'now')",  # the format in which SQLAlchemy stores a time
    "postgresql": "clock_timestamp()",
}
"""The database's own time in each dialect, so that hosts whose clocks differ agree on every lease."""

MAY_WRITE = """
    SELECT pg_is_in_recovery() OR current_setting('default_transaction_read_only') = 'on',
           coalesce(has_table_privilege(to_regclass('task'), 'UPDATE'),
                    has_schema_privilege(current_schema(), 'CREATE'), false)
"""
"""Whether PostgreSQL takes no writes; and whether the role may write the tables, or make them anew."""


class Transaction:
    """An open transaction. `clock` is the database's time as SQL."""

    def __init__(self, connection: Connection, clock: ColumnElement[datetime]) -> None:
        """Take the connection and clock; the time is read on first use."""
        self.connection, self.clock = connection, clock
        self._now: datetime | None = None

    @property
    def now(self) -> datetime:
        """The time with which everything written in this transaction is stamped."""
        self._now = self._now or self.connection.scalars(select(self.clock)).one()
        return self._now

    @now.setter
    def now(self, read: datetime) -> None:
        """Keep the time that a statement of this transaction has read from `clock`."""
        self._now = read

    def forget_time(self) -> None:
        """Read the time anew when it is asked for: what was read is as old as the wait for a lock."""
        self._now = None

    def insert(self, table: Table) -> sqlite.Insert | postgresql.Insert:
        """Return an INSERT that supports ON CONFLICT; the two dialects render it the same."""
        if self.connection.dialect.name == "postgresql":
            return postgresql.insert(table)
        return sqlite.insert(table)


class Store:
    """The database that all processes share. Threads may share a store; a forked process must make its own.

    A verb is a function of this package that takes the transaction as its first argument:
    `store.write(jobs.cancel, job_id)`. Any verb may raise StoreUnavailable, and DiskFull if it writes.
    """

    def __init__(self, url: str, clock: str | None = None, *, read_only: bool = False) -> None:
        """Prepare connections to an SQLAlchemy URL without opening any; `clock` is SQL for its time.

        A `read_only` store leaves no trace: it creates no folder and no file. Raises OptionRefused.
        """
        checked = _checked(url)
        try:
            self._engine = _engine(checked, read_only=read_only)
        except (ArgumentError, ValueError):  # servers and ports that do not match, or what is no number
            raise _unreadable() from None
        self._writer = self._engine.execution_options(immediate=True)
        is_sqlite = self._engine.dialect.name == "sqlite"  # where every transaction has one
        snapshot = {} if is_sqlite else {"isolation_level": "REPEATABLE READ"}
        self._reader = self._engine.execution_options(**snapshot)
        expression = clock or CLOCKS[self._engine.dialect.name]
        self._clock = type_coerce(literal_column(expression), UtcTime())

    def read(self, verb: Callable[Concatenate[Transaction, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call a verb in a read-only transaction of its own."""
        with self.reading() as tx:
            return verb(tx, *args, **kwargs)

    def write(self, verb: Callable[Concatenate[Transaction, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call a verb in a transaction of its own."""
        with self.writing() as tx:
            return verb(tx, *args, **kwargs)

    @contextmanager
    def reading(self) -> Iterator[Transaction]:
        """Open a transaction that changes nothing and sees one snapshot; on SQLite it never waits."""
        with _translated(), self._reader.begin() as connection:
            yield Transaction(connection, self._clock)

    @contextmanager
    def writing(self) -> Iterator[Transaction]:
        """Open a transaction that is committed at its end, or rolled back on an error.

        After StoreUnavailable it may have been committed anyway.
        """
        with _translated(), self._writer.begin() as connection:
            yield Transaction(connection, self._clock)

    def close(self) -> None:
        """Close every idle connection."""
        self._engine.dispose()


def _checked(url: str) -> URL:
    """Return the parsed URL if it is for SQLite in a file or PostgreSQL. Raises OptionRefused."""
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        # Without its cause, which quotes what stands where a port should: it may be of a password.
        raise _unreadable() from None
    if "%00" in url:  # libpq ends there, without the options behind it, and SQLite raises ValueError
        raise _unreadable()
    in_memory = parsed.database in (None, "", ":memory:")
    if parsed.drivername not in DRIVERS or (parsed.drivername == "sqlite" and in_memory):
        detail = f"{parsed.drivername!r} without a file or server is not a durable database that Quarry knows"
        raise OptionRefused(detail, field="database_url", cure=URLS)
    if parsed.drivername == "sqlite" and "?" in url:
        # Quarry sets what it needs; others move the file into memory, or end its name.
        detail = "an SQLite URL has no options behind '?', and no '?' in its path"
        raise OptionRefused(detail, field="database_url", cure=f"leave them out; {URLS}")
    if any(isinstance(given, tuple) and name not in ("host", "port") for name, given in parsed.query.items()):
        detail = "the database URL has an option behind '?' twice"
        raise OptionRefused(detail, field="database_url", cure="leave out all but one")
    if parsed.drivername != "sqlite" and not parsed.query.keys() <= _libpq_options():
        # Not quoted: it may be of a password that has a '?'.
        detail = "the database URL has an option behind '?' that libpq does not know"
        raise OptionRefused(detail, field="database_url", cure="use libpq's, such as '?sslmode=verify-full'")
    return parsed


def _libpq_options() -> set[str]:
    """Return what a URL may have behind '?'; with the driver's `autocommit`, no transaction would be one."""
    return {option.keyword.decode() for option in psycopg.pq.Conninfo.get_defaults()}


def _unreadable() -> OptionRefused:
    cure = f"{URLS}; several servers are given as '?host=one:5432&host=two:5432' behind the name"
    return OptionRefused("the database URL cannot be read", field="database_url", cure=cure)


def missing_file(url: str) -> Path | None:
    """Return the file of an SQLite database that does not exist yet; None for any other database.

    Raises OptionRefused.
    """
    parsed = _checked(url)
    file = Path(str(parsed.database)).absolute()
    return file if parsed.get_backend_name() == "sqlite" and not file.exists() else None


def check_writable(tx: Transaction) -> None:
    """Refuse a database that a service could read but not write. Writes nothing. Raises StoreUnavailable."""
    connection = tx.connection
    if connection.dialect.name == "postgresql":
        read_only, may_write = connection.execute(text(MAY_WRITE)).one()
        if read_only:
            cure = "name the server that takes writes in QUARRY_DATABASE_URL, or let this one take them"
            raise StoreUnavailable("the database takes no writes", cure=cure)
        if not may_write:
            cure = "grant it: deploy/README.md lists what a worker's role needs; a service owns its tables"
            raise StoreUnavailable("the database's role has no right to write", cure=cure)
        return
    file = Path(str(connection.exec_driver_sql("PRAGMA database_list").one().file))
    check_places(file.parent, file, file.with_name(f"{file.name}-wal"), file.with_name(f"{file.name}-shm"))


def check_places(*places: Path) -> None:
    """Refuse files or folders that are there and cannot be written. Raises StoreUnavailable."""
    for place in places:
        if place.exists() and not os.access(place, os.W_OK):
            raise StoreUnavailable(f"{place} cannot be written", cure="give it to the user of the service")


def _engine(url: URL, *, read_only: bool) -> Engine:
    """Return an engine with the hooks of its dialect.

    Both use a pool of connections. Closing the last connection to an SQLite database checkpoints the whole
    WAL, which every transaction would pay for without a pool. The pool is unbounded there: writers wait for
    the database's lock anyway, and readers need not wait.
    """
    if url.get_backend_name() == "postgresql":
        engine = create_engine(
            url.set(drivername="postgresql+psycopg", query=SILENCE | WRITABLE | url.query),
            pool_pre_ping=True,
            hide_parameters=True,
        )
        event.listen(engine, "connect", _prepare_postgresql)
        event.listen(engine, "do_connect", _connect_to_look if read_only else _connect)
        return engine.execution_options(postgresql_readonly=read_only)
    if read_only:
        file = Path(str(url.database)).absolute()
        # Without a WAL file nobody has the database open; with `immutable` SQLite does not create one to read
        # it.
        mode = {"mode": "ro"} if file.with_name(f"{file.name}-wal").exists() else {"immutable": "1"}
        url = url.set(database=file.as_uri(), query={"uri": "true", **mode})
        return create_engine(url, hide_parameters=True)
    engine = create_engine(url, max_overflow=-1, hide_parameters=True)
    make_folder(Path(str(url.database)).absolute().parent)
    event.listen(engine, "connect", _prepare_sqlite)
    event.listen(engine, "begin", _begin_sqlite)
    return engine


def _connect(
    dialect: Dialect, entry: ConnectionPoolEntry, given: Sequence[Any], named: Mapping[str, Any]
) -> DBAPIConnection:
    """Connect to PostgreSQL. Raises OptionRefused if the driver can make nothing of the URL."""
    try:
        return dialect.connect(*given, **named)
    except psycopg.ProgrammingError as error:  # of a value; psycopg names its option
        detail = f"the database URL cannot be used: {error}"
        raise OptionRefused(detail, field="database_url", cure="fix the value of that option") from None
    except ValueError:  # of a server's or user's name that cannot be encoded
        raise _unreadable() from None


def _connect_to_look(
    dialect: Dialect, entry: ConnectionPoolEntry, given: Sequence[Any], named: Mapping[str, Any]
) -> DBAPIConnection:
    """Connect to the server that a service would; if none takes writes, to one that can be asked why."""
    try:
        return _connect(dialect, entry, given, named)
    except psycopg.errors.ConnectionTimeout:
        raise
    except psycopg.OperationalError:
        return _connect(dialect, entry, given, dict(named) | {"target_session_attrs": "any"})


def _prepare_postgresql(connection: DBAPIConnection, entry: ConnectionPoolEntry) -> None:
    # A process that is stopped in the middle of a transaction must not hold a job's row forever.
    cursor = connection.cursor()
    cursor.execute(f"SET idle_in_transaction_session_timeout = {WAIT_MS}")
    cursor.execute(f"SET lock_timeout = {WAIT_MS}")
    # Otherwise a server that crashes may lose a commit whose files are already moved or deleted by it.
    cursor.execute(
        "SELECT set_config('synchronous_commit', 'on', false) "
        "WHERE current_setting('synchronous_commit') = 'off'"
    )
    cursor.close()
    connection.commit()


def _prepare_sqlite(connection: DBAPIConnection, entry: ConnectionPoolEntry) -> None:
    connection.isolation_level = None  # the driver's own BEGIN is too late and takes no write lock
    cursor = connection.cursor()
    cursor.execute(f"PRAGMA busy_timeout = {WAIT_MS}")
    cursor.execute("PRAGMA journal_mode = WAL")
    cursor.execute("PRAGMA synchronous = FULL")
    cursor.execute("PRAGMA foreign_keys = ON")
    cursor.close()


def _begin_sqlite(connection: Connection) -> None:
    # On SQLite a transaction that reads first and writes later would fail if another wrote in between.
    immediate = connection.get_execution_options().get("immediate", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if immediate else "BEGIN")


@contextmanager
def _translated() -> Iterator[None]:
    """Turn driver errors about the database itself into the service's errors; others pass through."""
    try:
        yield
    except DBAPIError as error:
        if _disk_full(error.orig):
            cure = "free space where the database is, then resume the job"
            raise DiskFull("the database cannot grow", cure=cure) from error
        if isinstance(error, OperationalError) or error.connection_invalidated:
            cure = "start the database, or fix QUARRY_DATABASE_URL"
            raise StoreUnavailable("the database does not answer", cure=cure) from error
        if type(error) is DatabaseError:
            # SQLite raises this for a page that it could not read, which may be a transient disk error.
            cure = "look for disk errors in the kernel's log; if it does not pass, restore a backup"
            raise StoreUnavailable("the database cannot be read", cure=cure) from error
        if isinstance(error.orig, psycopg.Error) and error.orig.sqlstate in READ_ONLY_STATES:
            cure = "end the failover, or name the server that takes writes in QUARRY_DATABASE_URL"
            raise StoreUnavailable(f"the database takes no writes: {error.orig}", cure=cure) from error
        if isinstance(error.orig, psycopg.errors.InsufficientPrivilege):
            cure = "grant it: deploy/README.md lists what a worker's role needs"
            raise StoreUnavailable(f"the database's role has no right: {error.orig}", cure=cure) from error
        raise
    except PoolTimeout as error:
        raise StoreUnavailable("every connection to the database is in use", cure="try again") from error


def said_by_driver(error: BaseException) -> str:
    """Return what the driver said, on one line, behind ': '; for the operator alone, as it names servers."""
    cause = error.__cause__
    return f": {' '.join(str(cause.orig).split())}" if isinstance(cause, DBAPIError) else ""


def _disk_full(error: BaseException | None) -> bool:
    if isinstance(error, sqlite3.OperationalError):
        return error.sqlite_errorcode == sqlite3.SQLITE_FULL
    return isinstance(error, psycopg.errors.DiskFull)
