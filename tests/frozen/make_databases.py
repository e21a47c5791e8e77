"""Makes the frozen databases of a new version. No test runs it.

`python -m tests.frozen.make_databases`, by the last code before a new migration, writes a dump of its newest
version for each kind of database into `databases/`. It is the newest dump that is there, migrated. How the
dumps came to be:

- 0001 was written by the code of commit 7e4c320, and 0004 by that of 29c500a: at 29c500a this script holds
  the jobs that they are made of;
- 0007 was migrated from 0004 by the code of 9b1b2b2 and 7d41bde, 0008 from 0007 by that of 585b282, and the
  tests make 0005 and 0006 in the same way;
- 0002 and 0003 are made from 0001 by the tests, by the migrations themselves.

One data folder serves all: that of 0001 on SQLite. The jobs are named for where they are:

- queued: nobody has looked at it;
- planning: its planner was killed after the first unit;
- planned: all its units wait;
- leased: one unit done, one leased by a worker that was killed while it wrote, after another that was; the
  third leased by one that was killed before it wrote;
- publishing: all units done, its publisher killed before it pushed anything;
- blocked: the disk was full when the first unit was written;
- completed.

The leases were for a minute, from the day on which the database was made.
"""

import sqlite3
import subprocess
import tempfile
from contextlib import closing
from pathlib import Path

from tests.frozen.databases import FOLDER, MIGRATIONS, load
from tests.support.pg import running_postgres


def dump_sqlite(path: Path, out: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        out.write_text("\n".join(connection.iterdump()) + "\n", encoding="utf-8")


def dump_postgresql(url: str, out: Path) -> None:
    """Dump without what only psql understands."""
    name, _, host = url.removeprefix("postgresql+psycopg://quarry@/").partition("?host=")
    command = ["pg_dump", "-h", host, "-U", "quarry", "--inserts", "--no-owner", "--no-privileges", name]
    dumped = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    lines = [line for line in dumped.splitlines() if line and not line.startswith(("--", "\\"))]
    out.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main(out: Path = FOLDER) -> None:
    """Write both dumps of the newest version to `out`."""
    newest = MIGRATIONS[-1]
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "quarry.db"
        load(newest, f"sqlite:///{path}")
        dump_sqlite(path, out / f"{newest}-sqlite.sql")
    with running_postgres() as server, server.database() as url:
        load(newest, url)
        dump_postgresql(url, out / f"{newest}-postgresql.sql")


if __name__ == "__main__":
    main()
