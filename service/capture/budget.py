"""Bounds the tokens and requests in the engine at once, first come first served but for what goes ahead.

Without it all requests of a unit would queue in the engine, ahead of the units after it. With it the engine
still holds more than one step's batch, and a new unit's rows follow the last unit's without a bubble.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass

from service.work.meters import ENGINE


@dataclass(slots=True)
class Held:
    """A part of the budget. `is_shared`: another was held at the same time; final once it is released."""

    is_shared: bool


class InFlight:
    """A first-in-first-out budget. A request larger than the whole budget is admitted on its own."""

    def __init__(self, max_tokens: int, max_requests: int) -> None:
        self.max_tokens, self.max_requests = max_tokens, max_requests
        self.tokens = 0
        self.requests = 0
        self._admitted = 0
        self._queue = asyncio.Lock()
        """Held by the next request of the queue; the others wait for it in order."""
        self._first = asyncio.Lock()
        """Held by the next request: the queue's, or one that goes ahead of it."""
        self._room = asyncio.Event()
        self._changed = time.monotonic()
        """When the engine last made progress, or was last idle before a request."""

    @asynccontextmanager
    async def hold(
        self, num_tokens: int, *, num_requests: int = 1, ahead: bool = False, alone: bool = False
    ) -> AsyncIterator[Held]:
        """Wait until `num_tokens` of `num_requests` fit, hold them during the body, then release them.

        With `ahead`, do not queue. With `alone`, wait until nothing else is held, and let nothing else in.
        """
        if alone:
            num_tokens = max(num_tokens, self.max_tokens + 1)
        async with nullcontext() if ahead else self._queue, self._first:
            while not self._fits(num_tokens, num_requests):
                self._room.clear()
                await self._room.wait()
            if not self.requests:
                self._changed = time.monotonic()
                ENGINE.enter("busy")
            held = Held(is_shared=self.requests > 0)
            self.tokens += num_tokens
            self.requests += num_requests
            self._admitted += 1
            admitted = self._admitted
        try:
            yield held
        finally:
            held.is_shared = held.is_shared or self._admitted > admitted
            self._changed = time.monotonic()
            self.tokens -= num_tokens
            self.requests -= num_requests
            if not self.requests:
                ENGINE.enter("idle")
            self._room.set()

    def heard(self) -> None:
        """Note progress that releases nothing yet."""
        self._changed = time.monotonic()

    async def silence(self, seconds: float) -> None:
        """Wait until requests have been in flight for `seconds` without any progress."""
        while (left := self._changed + seconds - time.monotonic()) > 0 or not self.requests:
            await asyncio.sleep(left if left > 0 else seconds)

    def _fits(self, num_tokens: int, num_requests: int) -> bool:
        if not self.requests:
            return True
        has_room = self.tokens + num_tokens <= self.max_tokens
        return has_room and self.requests + num_requests <= self.max_requests
