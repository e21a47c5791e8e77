"""Keeps a publishing lease alive from a thread of its own while a long upload runs."""

import threading
from typing import Self

from service.errors import STORE_AWAY, LeaseLost, QuarryError
from service.store import PublishLease, Store

BEATS = 3
"""Extensions in the time of one lease. When as many have found no database, one after the other, the lease
has run out, and another publisher may hold the repository."""


class LeaseKeeper:
    """Extends `lease` every third of `ttl_s` while the context is open; `check` says if it still holds."""

    def __init__(self, store: Store, lease: PublishLease, ttl_s: float) -> None:
        """Start nothing yet."""
        self._store, self._lease, self._ttl_s = store, lease, ttl_s
        self._done = threading.Event()
        self._met: list[QuarryError] = []
        # A thread of a pool would be joined at the interpreter's exit, which then waited for the upload.
        self._thread = threading.Thread(target=self._beat, name=f"lease-{lease.job_id}", daemon=True)

    def __enter__(self) -> Self:
        """Begin to extend."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End; the lease then runs out by itself."""
        self._done.set()
        self._thread.join()

    def check(self) -> None:
        """Raise what ended the extending: LeaseLost, or STORE_AWAY for as long as a lease lives."""
        # Looked at first: the thread says what it met before it ends.
        ended = not self._thread.is_alive() and not self._done.is_set()
        if self._met:
            raise self._met[0]
        if ended:
            raise QuarryError("internal error: the lease is no longer kept", cure="see the worker's log")

    def _beat(self) -> None:
        missed = 0
        while not self._done.wait(self._ttl_s / BEATS):
            try:
                lost = self._store.extend([self._lease], self._ttl_s)
                missed = 0
            except STORE_AWAY as error:
                missed += 1
                if missed == BEATS:
                    self._met.append(error)
                    return
            else:
                if lost:
                    self._met.append(LeaseLost(f"another publisher has job {self._lease.job_id}"))
                    return
