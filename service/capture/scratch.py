"""Limits the disk space of shards that are removed once the job's repository has them."""

import socket
from collections.abc import Sequence

from service.settings import Settings
from service.store import HOME, Store, UnitLease, storing


def full(store: Store, settings: Settings, in_flight: Sequence[UnitLease], host: int) -> str | None:
    """Return what such jobs wait for if `QUARRY_SCRATCH_BYTES` are used; from half that, hasten uploads.

    Units in flight count with their maximum size. Raises StoreUnavailable.
    """
    if settings.scratch_bytes is None:
        return None
    num_bytes, num_units, num_resting = store.read(storing.unstored, host)
    num_bytes += sum(lease.state_bytes for lease in in_flight if not lease.keeps_local)
    if num_units and num_bytes >= settings.scratch_bytes / 2:
        store.write(storing.hasten, host)
    if num_bytes < settings.scratch_bytes:
        return None
    rest = f", {num_resting} of them of stopped jobs: resume or delete those" if num_resting else ""
    what = "to upload or to be consumed" if host == HOME else "to upload"
    return f"disk of {socket.gethostname()}, {num_units} units {what}{rest}"
