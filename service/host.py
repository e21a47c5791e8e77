"""This process's host: the folder that holds its captured units, identified by an id stored there."""

import logging
import os
import secrets
import socket
from contextlib import suppress
from functools import cache
from pathlib import Path

from schemas.dataset.seal import fsync, make_folder
from service.errors import OptionRefused, writing
from service.settings import Settings
from service.store import HOME, Store, hosts
from service.work.runner import LoopContext

logger = logging.getLogger(__name__)

HOST_FILE = "host"


def check_data_dir(settings: Settings) -> None:
    """Make the data folder; refuse one that cannot be written, or whose database cannot.

    To SQLite that is like a database that is away, for which services and workers wait. Raises OptionRefused,
    and OSError if the folder cannot be made.
    """
    cure = "give it to the user of this process, or name another folder in QUARRY_DATA_DIR"
    settings.data_dir.mkdir(parents=True, exist_ok=True)
    database = () if settings.database_url else ("quarry.db", "quarry.db-wal", "quarry.db-shm")
    for place in (settings.data_dir, *(settings.data_dir / name for name in database)):
        if place.exists() and not os.access(place, os.W_OK):
            raise OptionRefused(f"{place} cannot be written", field="data_dir", cure=cure)


def host_of(store: Store, settings: Settings) -> int:
    """Return the number of this process's host in the database, as `hosts.register` does.

    Raises OptionRefused, StoreUnavailable, DiskFull, WriteFailed.
    """
    with writing("the host's id"):
        host_id = kept_word(settings.data_dir.resolve(), HOST_FILE)
    known = store.read(hosts.number, host_id)
    if known is not None and (known == HOME or not settings.is_at_home):
        return known
    return store.write(hosts.register, host_id, socket.gethostname(), is_home=settings.is_at_home)


def run_lost(context: LoopContext) -> bool:
    """Give up the units of hosts that were silent for too long; return False: there is no more to do now."""
    for host_id in context.store.read(hosts.silent, context.settings.host_lost_s):
        if units := context.store.write(hosts.forget, host_id):
            logger.warning("host %s is lost: %d units that it had captured run again", host_id, units)
    return False


@cache
def kept_word(folder: Path, name: str) -> str:
    """Return the 32 random hex digits stored in a folder's file, which is created if missing.

    Raises OSError.
    """
    make_folder(folder)
    file, draft = folder / name, folder / f".{name}.{secrets.token_hex(4)}"
    if not file.exists():
        draft.touch(0o600)  # one of these words seals the page's sessions
        draft.write_text(secrets.token_hex(16))
        fsync(draft)  # a file left empty by a power cut would be the same id on every machine
        with suppress(FileExistsError):  # another process was faster
            os.link(draft, file)
        draft.unlink()
        fsync(folder)
    return file.read_text().strip()
