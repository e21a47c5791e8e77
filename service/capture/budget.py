"""How much may be in the engine at once: a bound on tokens and on requests, first come first served.

Without it every request of a unit would wait inside the engine, and the units behind could not be told apart
from it. With it the engine always holds more than one step's batch, and a new unit's rows follow the last
one's without a bubble.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class InFlight:
    """A first-in-first-out budget. A request larger than the whole budget is let through alone."""

    def __init__(self, max_tokens: int, max_requests: int) -> None:
        """Begin empty."""
        self._max_tokens, self._max_requests = max_tokens, max_requests
        self.tokens = 0
        self.requests = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._heard = time.monotonic()
        """When something was last given back, or taken with nothing out."""

    @asynccontextmanager
    async def hold(self, num_tokens: int) -> AsyncIterator[None]:
        """Wait until `num_tokens` fit, hold them for the body, give them back."""
        if self._waiting or not self._fits(num_tokens):
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append((num_tokens, turn))
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._give_back(num_tokens)
                raise
        else:
            self._take(num_tokens)
        try:
            yield
        finally:
            self._give_back(num_tokens)

    async def silence(self, seconds: float) -> None:
        """Wait until something has been out for `seconds` in which nothing was given back."""
        while (left := self._heard + seconds - time.monotonic()) > 0 or not self.requests:
            await asyncio.sleep(left if left > 0 else seconds)

    def _fits(self, num_tokens: int) -> bool:
        if self.requests == 0:
            return True
        return self.tokens + num_tokens <= self._max_tokens and self.requests < self._max_requests

    def _take(self, num_tokens: int) -> None:
        if not self.requests:
            self._heard = time.monotonic()
        self.tokens += num_tokens
        self.requests += 1

    def _give_back(self, num_tokens: int) -> None:
        self._heard = time.monotonic()
        self.tokens -= num_tokens
        self.requests -= 1
        while self._waiting:
            want, turn = self._waiting[0]
            if turn.done():  # cancelled while it waited
                self._waiting.popleft()
                continue
            if not self._fits(want):
                return
            self._waiting.popleft()
            self._take(want)
            turn.set_result(None)
