"""Answers of a fake Hub that are none: a refusal in the Hub's form, and a connection that breaks."""

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
