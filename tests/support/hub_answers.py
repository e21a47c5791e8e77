"""Answers of a fake Hub that are none: a refusal in the Hub's form, a connection that breaks, silence."""

import socket
import struct

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send


class Refusal(Exception):
    """An error answer in the Hub's form."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        headers = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
        self.response = JSONResponse({"error": message}, status, headers)


class Broken(Response):
    """An answer shorter than it says, so that the server closes the connection under the client."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send(
            {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"1000000")]}
        )
        await send({"type": "http.response.body", "body": b""})


class Stalled(Response):
    """No answer, until the client hangs up."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass


class Reset(Stalled):
    """A reset of the connection. The server's own `receive` is the only way to it."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        transport = receive.__self__.transport
        no_wait = struct.pack("ii", 1, 0)
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, no_wait)
        transport.abort()
        await super().__call__(scope, receive, send)


DROPS = {"before": Broken, "reset": Reset, "stall": Stalled}
"""Of each fault that keeps a call from taking effect: its answer."""
