"""Limits on what an owner may use of the API at once, in one place.

Runs on the event loop, except `checking`.

An owner is the name of keys; all callers without a key are one owner, the operator. What exceeds an owner's
share is refused, or waits behind that owner's own requests, so that the rest is free for others.
"""

import threading
import time
from asyncio import Semaphore
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from enum import StrEnum

from service.errors import QuotaExceeded, ServiceBusy
from service.settings import Settings

BODIES_HELD = 32
"""How many bodies of maximum size, requests and answers together, are in memory at once."""


class Taken(StrEnum):
    """What is refused if an owner's share is exceeded."""

    REQUESTS = "requests in work"
    STREAMS = "event streams and waits for units"
    DOWNLOADS = "downloads"
    ESTIMATES = "estimates in work"
    BYTES = "bytes of requests and answers"


class Turn(StrEnum):
    """What waits if an owner's share is exceeded."""

    LARGE_BODY = "a process of its own reads it, which takes 250 MB"
    SUBMISSION = "it may wait for the Hub or compile a template"
    DOWNLOAD = "a large answer is made of two copies"
    SAMPLE = "a process of its own reads a row and its tokenizer for a page"


TURNS = {Turn.LARGE_BODY: 2, Turn.SUBMISSION: 8, Turn.DOWNLOAD: 4, Turn.SAMPLE: 2}
"""How many may have a turn at once; the owner of a key may have at most half of them."""
CHECKS, CHECK_WAIT_S = 2, 15.0
"""How many requests children check at once, of which one may be a key owner's, and how long a request waits
for its turn.
"""


class Budget:
    """What is in use now, by owner."""

    def __init__(self, settings: Settings) -> None:
        """Start with nothing in use. `connections` may be lowered before the first request."""
        self.connections = settings.max_connections
        self._settings = settings
        self._taken: defaultdict[Taken, Counter[str | None]] = defaultdict(Counter)
        self._all_turns = {turn: Semaphore(number) for turn, number in TURNS.items()}
        self._turns: dict[tuple[Turn, str | None], Semaphore] = {}
        self._all_checks = threading.Semaphore(CHECKS)
        self._checks: dict[str | None, threading.Semaphore] = {}
        self._minute, self._in_minute = 0, Counter[str]()

    @contextmanager
    def taking(self, owner: str | None, what: Taken, amount: int = 1) -> Iterator[None]:
        """Use an amount while the context lasts. Raises QuotaExceeded."""
        taken, (share, together) = self._taken[what], self._bounds(what)
        if owner is None and what is not Taken.STREAMS:
            share = together
        for used, bound, whose in ((taken[owner], share, "yours"), (taken.total(), together, "all callers'")):
            if used + amount > bound:
                detail = f"{used} {what} are {whose}; at most {bound} may be"
                cure = "send it again after the seconds that the Retry-After header says"
                raise QuotaExceeded(detail, field="Authorization", cure=cure)
        taken[owner] += amount
        try:
            yield
        finally:
            taken[owner] -= amount

    @asynccontextmanager
    async def turn(self, owner: str | None, turn: Turn) -> AsyncIterator[None]:
        """Wait for a turn: first behind the owner's own, then behind the limited number of others."""
        share = TURNS[turn] if owner is None else TURNS[turn] // 2
        async with self._turns.setdefault((turn, owner), Semaphore(share)), self._all_turns[turn]:
            yield

    @contextmanager
    def checking(self, owner: str | None) -> Iterator[None]:
        """Like `turn`, but for threads: wait for a turn to check a request in a child. Raises ServiceBusy."""
        share = CHECKS if owner is None else CHECKS // 2
        own = self._checks.setdefault(owner, threading.Semaphore(share))
        until_s = time.monotonic() + CHECK_WAIT_S
        with ExitStack() as held:
            for semaphore in (own, self._all_checks):
                if not semaphore.acquire(timeout=max(0.0, until_s - time.monotonic())):
                    raise ServiceBusy("other requests are still being checked", cure="send it again later")
                held.callback(semaphore.release)
            yield

    def count_request(self, owner: str, limit: int) -> None:
        """Count a request in this minute. Raises QuotaExceeded above `limit`."""
        minute = int(time.monotonic() // 60)
        if minute != self._minute:
            self._minute, self._in_minute = minute, Counter()
        self._in_minute[owner] += 1
        if self._in_minute[owner] > limit:
            cure = "send it again in the next minute"
            raise QuotaExceeded(f"{limit} requests a minute are allowed", field="Authorization", cure=cure)

    def _bounds(self, what: Taken) -> tuple[int, int]:
        """Return the limits of one owner and of all together; both leave connections for other uses."""
        settings, body = self._settings, self._settings.max_body_bytes
        return {
            Taken.REQUESTS: (max(2, self.connections // 16), self.connections // 4),
            Taken.STREAMS: (settings.event_listeners, self.connections // 2),
            Taken.DOWNLOADS: (max(2, self.connections // 16), self.connections // 8),
            Taken.ESTIMATES: (max(1, settings.estimates_at_once // 2), settings.estimates_at_once),
            Taken.BYTES: (BODIES_HELD // 4 * body, BODIES_HELD * body),
        }[what]
