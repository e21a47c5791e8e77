"""Keeps every lease of a process from one thread, so that no long step of its work loses it."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Self

from service.errors import STORE_AWAY, LeaseLost, QuarryError
from service.settings import Settings
from service.store import Lease, Store, tasks

logger = logging.getLogger(__name__)

BEATS = 4
"""Extensions in the time of one lease."""
LONGEST_BEAT_S = 5.0
"""The end of a cancelled job is noticed by its leases' next extension."""


class Stopped(Exception):
    """The process ends: what is left of the task is for the next owner."""


class Kept:
    """One lease that a keeper extends. Threads may share it."""

    def __init__(
        self, lease: Lease, keeper: "Keeper", on_lost: Callable[[], None], stopped: Callable[[], bool]
    ) -> None:
        """Hold a lease that was granted just now; `stopped` says whether this process ends.

        `on_lost` is called while nothing is kept, in any thread: it must return at once.
        """
        self.lease = lease
        self.lost = False
        self.extended_s = time.monotonic()
        self._keeper, self._on_lost, self._stopped = keeper, on_lost, stopped

    def check(self) -> None:
        """Raise LeaseLost once another owner has the task or its job was stopped; Stopped."""
        if self.lost:
            raise LeaseLost(
                f"{self.lease.owner} no longer holds the {self.lease.kind} of {self.lease.job_id}"
            )
        self._keeper.check()
        if self._stopped():
            raise Stopped

    def confirm(self) -> None:
        """Wait until the database has extended the lease since this call. Raises LeaseLost, Stopped.

        A step that the store cannot fence, such as a commit to the Hub, must not begin on a lease that ran
        out while the database was away. This host's clock does not count: it may have been suspended.
        """
        begun_s = time.monotonic()
        self.check()
        while self.extended_s < begun_s:
            if not self._keeper.beat():
                time.sleep(self._keeper.ttl_s / BEATS)
            self.check()

    def lose(self) -> None:
        """Note the loss, once."""
        if not self.lost:
            self.lost = True
            self._on_lost()


class Keeper:
    """Extends leases while its context is open.

    A database that is away ends nothing: the leases may run out meanwhile, and the first extension that it
    answers says which of them were taken.
    """

    def __init__(self, store: Store, ttl_s: float) -> None:
        """Extend by `store`, which should not be the one whose connections the leases' work may use up."""
        self._store, self.ttl_s = store, ttl_s
        self._kept: set[Kept] = set()
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._error: Exception | None = None
        # A daemon: an upload in another thread must not be waited for at the interpreter's exit.
        self._thread = threading.Thread(target=self._run, name="lease-keeper", daemon=True)

    def __enter__(self) -> Self:
        """Begin to extend."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End; leases that are still kept run out."""
        self._done.set()
        self._thread.join()

    @contextmanager
    def keep(
        self,
        lease: Lease,
        on_lost: Callable[[], None] = lambda: None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> Iterator[Kept]:
        """Extend `lease` in this block."""
        kept = Kept(lease, self, on_lost, stopped)
        with self._lock:
            self._kept.add(kept)
        try:
            yield kept
        finally:
            with self._lock:
                self._kept.discard(kept)

    def check(self) -> None:
        """Raise an error if a bug has ended the thread: no lease is kept any more."""
        if self._error is not None:
            raise QuarryError("internal error: leases are no longer kept") from self._error

    def _run(self) -> None:
        try:
            while not self._done.wait(min(self.ttl_s / BEATS, LONGEST_BEAT_S)):
                self.beat()
        except Exception as error:
            # Supervisor: the owners of all leases must learn that they are no longer kept.
            logger.exception("leases are no longer kept")
            self._error = error

    def beat(self) -> bool:
        """Extend all leases now; return whether the database has answered."""
        with self._lock:
            kept = [one for one in self._kept if not one.lost]
        if not kept:
            return True
        begun_s = time.monotonic()
        try:
            lost = self._store.write(tasks.extend, [one.lease for one in kept], self.ttl_s)
        except STORE_AWAY as error:
            logger.warning("leases could not be extended: %s", error)
            return False
        with self._lock:  # nobody is called whose block has ended, and whose event loop may be closed
            for one in self._kept.intersection(kept):
                if any(lease is one.lease for lease in lost):
                    one.lose()
                else:
                    one.extended_s = max(one.extended_s, begun_s)
        return True


@contextmanager
def process_keeper(settings: Settings) -> Iterator[Keeper]:
    """Keep a process's leases in this block, on a connection to the database that nothing else uses."""
    store = Store(settings.database())
    try:
        with Keeper(store, settings.lease_s) as keeper:
            yield keeper
    finally:
        store.close()
