"""Extends all leases of a process from one thread, so that no lease is lost during a long step of work."""

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
"""How often a lease is extended within its duration."""
LONGEST_BEAT_S = 5.0
"""A cancelled job is noticed at the next extension of its leases."""


class Stopped(Exception):
    """The process is stopping: the rest of the task is left to the next owner."""


class Kept:
    """One lease that a keeper extends. Thread-safe."""

    def __init__(
        self, lease: Lease, keeper: "Keeper", on_lost: Callable[[], None], stopped: Callable[[], bool]
    ) -> None:
        """Take a lease that was just granted; `stopped` says whether this process is stopping.

        `on_lost` is called in any thread while the keeper is locked, so it must return at once.
        """
        self.lease = lease
        self.lost = False
        self.extended_s = time.monotonic()
        self._keeper, self._on_lost, self._stopped = keeper, on_lost, stopped

    def check(self) -> None:
        """Raise LeaseLost if another owner has the task or its job was stopped; Stopped if we must stop.

        Also Stopped if leases are no longer kept: the task is not at fault, and this process will end.
        """
        if self.lost:
            raise LeaseLost(
                f"{self.lease.owner} no longer holds the {self.lease.kind} of {self.lease.job_id}"
            )
        if self._keeper.error is not None or self._stopped():
            raise Stopped

    def confirm(self) -> None:
        """Wait until the database has extended the lease after this call. Raises LeaseLost, Stopped.

        A step that the store cannot fence, such as a commit to the Hub, must not start on a lease that
        expired while the database was away. This host's clock cannot tell: the host may have been suspended.
        """
        begun_s = time.monotonic()
        self.check()
        while self.extended_s < begun_s:
            if not self._keeper.beat():
                time.sleep(self._keeper.ttl_s / BEATS)
            self.check()

    def lose(self) -> None:
        """Record the loss and call `on_lost`, once."""
        if not self.lost:
            self.lost = True
            self._on_lost()


class Keeper:
    """Extends leases while its context is open.

    While the database is away, nothing is given up: the leases may expire, and the first extension that
    succeeds shows which of them were taken.
    """

    def __init__(self, store: Store, ttl_s: float) -> None:
        """Extend through `store`, which should not be one whose connections the leases' work may exhaust."""
        self._store, self.ttl_s = store, ttl_s
        self._kept: set[Kept] = set()
        self._lock = threading.Lock()
        self._done = threading.Event()
        self.error: Exception | None = None
        """The bug that has ended the thread."""
        # A daemon, so that the interpreter's exit does not wait for it.
        self._thread = threading.Thread(target=self._run, name="lease-keeper", daemon=True)

    def __enter__(self) -> Self:
        """Start extending leases."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop; leases that are still kept will expire."""
        self._done.set()
        self._thread.join()

    @contextmanager
    def keep(
        self,
        lease: Lease,
        on_lost: Callable[[], None] = lambda: None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> Iterator[Kept]:
        """Keep `lease` extended within the context."""
        kept = Kept(lease, self, on_lost, stopped)
        with self._lock:
            self._kept.add(kept)
        try:
            yield kept
        finally:
            with self._lock:
                self._kept.discard(kept)

    def check(self) -> None:
        """Raise QuarryError if a bug has ended the thread, so that leases are no longer kept."""
        if self.error is not None:
            raise QuarryError("internal error: leases are no longer kept") from self.error

    def _run(self) -> None:
        try:
            while not self._done.wait(min(self.ttl_s / BEATS, LONGEST_BEAT_S)):
                self.beat()
        except Exception as error:
            # Supervisor: the owners of all leases must learn that they are no longer kept.
            logger.exception("leases are no longer kept")
            self.error = error

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
        with self._lock:  # not after a `keep` has ended, when an event loop may be closed
            for one in self._kept.intersection(kept):
                if any(lease is one.lease for lease in lost):
                    one.lose()
                else:
                    one.extended_s = max(one.extended_s, begun_s)
        return True


@contextmanager
def process_keeper(settings: Settings) -> Iterator[Keeper]:
    """Keep a process's leases within the context, on a database connection that nothing else uses."""
    store = Store(settings.database())
    try:
        with Keeper(store, settings.lease_s) as keeper:
            yield keeper
    finally:
        store.close()
