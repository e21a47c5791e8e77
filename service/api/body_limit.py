"""Refuses a body whose declared length is too large before a byte of it is read, as a problem document."""

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from service.api.problems import http_problem, problem_response


class DeclaredLengthLimit:
    """ASGI middleware around starlette's `RequestBodyLimitMiddleware`.

    That one counts what arrives, and so also stops a chunked body, but answers a declared length in
    plain text.
    """

    def __init__(self, app: ASGIApp, max_body_bytes: int) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 413."""
        if scope["type"] == "http":
            declared = Headers(scope=scope).get("content-length", "0")
            if declared.isdecimal() and int(declared) > self._max_body_bytes:
                detail = f"the body has {declared} bytes; at most {self._max_body_bytes} are taken"
                await problem_response(http_problem(413, detail))(scope, receive, send)
                return
        await self._app(scope, receive, send)
