"""A connection with a deadline for its other side, and a bound on how many are open.

Uvicorn has neither: a caller who never ends a request, or never takes the answer, would keep a descriptor
and memory for as long as it likes.
"""

import asyncio
import resource
from collections.abc import Iterator
from typing import Any, cast

from fastapi import FastAPI
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from service.settings import Settings

BODIES_HELD = 32
"""Requests of the largest size that are in memory before they are answered."""
COUNTED_BYTES = 2**17
"""What a connection has received is counted in steps of so much."""


def most_connections(wanted: int) -> int:
    """Let this process open files for `wanted` connections; return for how many it may.

    A quarter of its files is for those that the kernel has taken and that come at once, a quarter for others.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 2 * wanted:
        soft = min(2 * wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return min(wanted, soft // 2)


class Connection(H11Protocol):
    """A connection of `api_server`. It must send each request whole and take the answer within a time.

    Where too many are open, or hold too much together, the one that has been silent for longest is closed. A
    connection whose request is being worked on is not.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        state = cast(FastAPI, config.app).state
        settings = cast(Settings, state.settings)
        self._timeout_s, self._most_bytes = settings.request_timeout_s, BODIES_HELD * settings.max_body_bytes
        self._most: int = state.most_connections
        self.held_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        """Begin to wait for a request; make room for it."""
        super().connection_made(transport)
        self._deadline = self.loop.call_later(self._timeout_s, self._end_if_waiting)
        self._heard_at = self.loop.time()
        if len(self.connections) > self._most:
            self._end_most_silent(held_bytes=0)

    def data_received(self, data: bytes) -> None:
        """Take a part of a request."""
        self._heard_at = self.loop.time()
        before, self.held_bytes = self.held_bytes, self.held_bytes + len(data)
        is_counted = before // COUNTED_BYTES < self.held_bytes // COUNTED_BYTES
        if is_counted and sum(one.held_bytes for one in self._all()) > self._most_bytes:
            self._end_most_silent(COUNTED_BYTES)
        super().data_received(data)

    def on_response_complete(self) -> None:
        """Begin to wait for the next request, and for this answer to be taken."""
        self.held_bytes = 0
        super().on_response_complete()
        self._begin_to_wait()

    def pause_writing(self) -> None:
        """Begin to wait for what was written to be taken."""
        super().pause_writing()
        self._begin_to_wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no longer."""
        self._deadline.cancel()
        super().connection_lost(exc)

    def is_waiting(self) -> bool:
        """Say whether the other side has to send the rest of a request, or to take what was written."""
        if self.cycle is None or self.cycle.response_complete:
            return True
        return self.cycle.more_body or self.flow.write_paused

    def _all(self) -> Iterator["Connection"]:
        """Return all connections of the server."""
        return (one for one in self.connections if isinstance(one, Connection))

    def _end_most_silent(self, held_bytes: int) -> None:
        """End a connection that waits for its other side, of those that hold so much."""
        waiting = (one for one in self._all() if one.held_bytes >= held_bytes and one.is_waiting())
        silent = min(waiting, key=lambda one: one._heard_at, default=None)
        if silent is not None:
            self.connections.discard(silent)
            silent.transport.abort()

    def _begin_to_wait(self) -> None:
        self._deadline.cancel()
        self._deadline = self.loop.call_later(self._timeout_s, self._end_if_waiting)
        self._heard_at = self.loop.time()

    def _end_if_waiting(self) -> None:
        if self.is_waiting():
            self.transport.abort()
