"""Keeps a publishing lease alive from a thread of its own while a long upload runs."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Self

from service.store import PublishLease, Store


class LeaseKeeper:
    """Extends `lease` every third of `ttl_s` while the context is open; `check` says if it still holds."""

    def __init__(self, store: Store, lease: PublishLease, ttl_s: float) -> None:
        """Start nothing yet."""
        self._store, self._lease, self._ttl_s = store, lease, ttl_s
        self._done = threading.Event()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="quarry-lease")

    def __enter__(self) -> Self:
        """Begin to extend."""
        self._beating = self._thread.submit(self._beat)
        return self

    def __exit__(self, *_: object) -> None:
        """End; the lease then runs out by itself."""
        self._done.set()
        self._thread.shutdown()

    def check(self) -> None:
        """Raise what the last extension raised: LeaseLost, StoreUnavailable."""
        if self._beating.done():
            self._beating.result()

    def _beat(self) -> None:
        while not self._done.wait(self._ttl_s / 3):
            self._store.extend_publish(self._lease, self._ttl_s)
