"""A connection with limits that uvicorn lacks: on time, on number, and on the cost of one read.

A client that never finishes a request, or never reads the answer, could hold a descriptor and memory forever;
one that sends the request in tiny parts could keep the event loop busy.
"""

import asyncio
import resource
import sys
from collections import OrderedDict
from typing import Any, cast

import httptools
from fastapi import FastAPI
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from service.settings import Settings

MAX_HEAD_BYTES = 65_536
"""Limit on a request's first line and headers, and on what follows a part of its body, such as trailers; not
counting what the read brought in which the request or the part began.
"""
MAX_HEADERS = 100
LEAST_PART_BYTES = 16
"""The average size that a body's parts must have, with an allowance of `FREE_BYTES`."""
FREE_BYTES = 1000 * LEAST_PART_BYTES


class RequestRefused(ValueError):
    """A request would cost too much or cannot be parsed; uvicorn answers 400 and closes the connection."""


def most_connections(wanted: int) -> int:
    """Raise this process's file limit for `wanted` connections; return how many it may have.

    That is half of its files. A quarter is for connections in the kernel's backlog, which may all arrive at
    once, and a quarter for other files.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 2 * wanted:
        soft = min(2 * wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return min(wanted, soft // 2)


class Connection(HttpToolsProtocol):
    """A connection of `api_server`. Clients must finish each request and read its answer within a timeout.

    If too many are open, the one that has been silent longest is closed: never the newest, nor one whose
    request is being worked on.
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
        self._timeout_s = cast(Settings, state.settings).request_timeout_s
        self._most: int = state.budget.connections
        self._by_silence = cast("OrderedDict[Connection, None]", state.connections)
        self._is_head, self._head_bytes, self._part_bytes = False, 0, FREE_BYTES

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        """Start waiting for a request; close another connection if there are too many."""
        super().connection_made(transport)
        self._deadline = self.loop.call_later(self._timeout_s, self._end_if_waiting)
        self._by_silence[self] = None
        if len(self._by_silence) > self._most:
            self._end_most_silent()

    def data_received(self, data: bytes) -> None:
        """Take a part of a request."""
        if self in self._by_silence:
            self._by_silence.move_to_end(self)
        self._data = data
        self._head_bytes += len(data)
        super().data_received(data)
        if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(f"headers or trailers have more than {MAX_HEAD_BYTES} bytes")

    def on_message_begin(self) -> None:
        """Begin a request; refuse a pipelined one, which would be held in memory until its turn."""
        if self.cycle is not None and not self.cycle.response_complete:
            raise RequestRefused("a request came before the one ahead of it was answered")
        self._is_head, self._head_bytes, self._part_bytes = True, 0, FREE_BYTES
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header; ignore a trailer, which would pass for one that was checked."""
        if not self._is_head:
            return
        if len(self.headers) >= MAX_HEADERS:
            raise RequestRefused(f"the request has more than {MAX_HEADERS} headers")
        if name.lower() != b"upgrade":
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Begin the work; a request that offers an upgrade is parsed again without the offer."""
        self._is_head = False
        if self.parser.get_method() == b"CONNECT":  # what follows is not HTTP, so it cannot be parsed again
            raise RequestRefused("CONNECT is no method of this service")
        if not self.parser.should_upgrade():
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        """End the request, unless it is to be parsed again."""
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def _unsupported_upgrade_warning(self) -> None:
        """Ignore the offer, as HTTP allows. The parser stops there, so a new one has to read the body."""
        ended = cast(httptools.HttpParserUpgrade, sys.exc_info()[1])
        head = b"".join(b"%s: %s\r\n" % header for header in self.headers)
        line = b"%s %s HTTP/1.1\r\n" % (self.parser.get_method(), self.url)
        self.parser = httptools.HttpRequestParser(self)
        self.data_received(line + head + b"\r\n" + self._data[ended.args[0] :])

    def on_body(self, body: bytes) -> None:
        """Take a part of the body; refuse too many small ones, each of which costs as much as a large one."""
        self._head_bytes = 0
        self._part_bytes = min(FREE_BYTES, self._part_bytes + len(body) - LEAST_PART_BYTES)
        if self._part_bytes < 0:
            raise RequestRefused(f"the chunks of the body have fewer than {LEAST_PART_BYTES} bytes")
        super().on_body(body)

    def send_400_response(self, msg: str) -> None:
        """Answer 400 and close; just close if a 400 would break, or pass for, another request's answer."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete or (cycle.more_body and not cycle.response_started):
            super().send_400_response(msg)
        else:
            self.transport.abort()

    def on_response_complete(self) -> None:
        """Start waiting for the next request, and for the client to read this answer."""
        super().on_response_complete()
        self._begin_to_wait()

    def pause_writing(self) -> None:
        """Start waiting for the client to read what was written."""
        super().pause_writing()
        self._begin_to_wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting."""
        self._deadline.cancel()
        self._by_silence.pop(self, None)
        super().connection_lost(exc)

    def is_waiting(self) -> bool:
        """Return whether the client has to send a request or the rest of one, or to read what was written."""
        if self.cycle is None or self.cycle.response_complete:
            return True
        return self.cycle.more_body or self.flow.write_paused

    def _end_most_silent(self) -> None:
        """Close the most silent other connection that waits for its client; others are limited elsewhere."""
        waiting = (one for one in self._by_silence if one.is_waiting() and one is not self)
        if (silent := next(waiting, None)) is not None:
            del self._by_silence[silent]
            silent.transport.abort()

    def _begin_to_wait(self) -> None:
        self._deadline.cancel()
        self._deadline = self.loop.call_later(self._timeout_s, self._end_if_waiting)
        if self in self._by_silence:
            self._by_silence.move_to_end(self)

    def _end_if_waiting(self) -> None:
        if self.is_waiting():
            self.transport.abort()
