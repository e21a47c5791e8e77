"""Refuses requests by their headers: those of another site's web page, and bodies that are too large."""

import re
from contextlib import ExitStack

from starlette.datastructures import Headers
from starlette.middleware.body_limit import RequestBodyLimitMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from schemas.job import Problem
from service.api.problems import METHODS, http_problem, problem_response
from service.control.budget import Budget, Taken
from service.errors import CallerRefused, QuotaExceeded
from service.settings import Settings

LOOPBACK = ("localhost", "127.0.0.1", "::1")
PROBES = frozenset({"/healthz", "/readyz"})
"""Probes call these by IP address, and they reveal nothing about jobs."""
READING = frozenset({"GET", "HEAD", "OPTIONS"})
SMALL_BODY_BYTES = 65_536
"""FastAPI reads a body parameter on the event loop, before the caller is authenticated."""
PART_BYTES = 65_536
"""How much of an answer is buffered in the connection while the client does not read it."""
LARGE_BODIES = re.compile(r"/extract|/estimate|/schedules(/[^/]*(/samples)?)?")
"""The paths whose bodies may have up to `max_body_bytes`; they are read in threads."""


class Gate:
    """ASGI middleware: the Host must be a name of this service, and a change must not come from another site.

    On the loopback the API needs no key. A page whose own domain was pointed here (DNS rebinding) passes the
    browser's origin check, but its Host gives it away. Starlette's `RequestBodyLimitMiddleware` counts what
    arrives, but refuses a declared length in plain text, so that is done here.
    """

    def __init__(self, app: ASGIApp, settings: Settings, budget: Budget) -> None:
        self._budget = budget
        limits = settings.max_body_bytes, min(SMALL_BODY_BYTES, settings.max_body_bytes)
        self._large, self._small = (RequestBodyLimitMiddleware(app, limit) for limit in limits)
        self._hosts = {name.lower() for name in (*LOOPBACK, settings.host, *settings.allowed_hosts)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 403 or 413."""
        is_large = LARGE_BODIES.fullmatch(scope.get("path", "")) is not None
        limited = self._large if is_large else self._small
        if scope["type"] != "http":
            await limited(scope, receive, send)
            return
        receive, send = self._guarded(scope, receive, send)
        if scope["method"] not in METHODS:
            refused = http_problem(405, f"{scope['method']} is no method of this service")
            allow = {"Allow": ", ".join(METHODS)}
            await problem_response(refused, allow)(scope, receive, send)
        elif (problem := self._refusal(scope, limited.max_body_size)) is not None:
            await problem_response(problem)(scope, receive, send)
        else:
            await limited(scope, receive, send)

    def _refusal(self, scope: Scope, limit_bytes: int) -> Problem | None:
        headers = Headers(scope=scope)
        try:
            if scope["path"] not in PROBES:
                self._check_caller(scope, headers)
        except CallerRefused as refused:
            return refused.problem()
        declared = headers.get("content-length", "0")
        if declared.isdecimal() and int(declared) > limit_bytes:
            detail = f"the body has {declared} bytes; at most {limit_bytes} are taken"
            return http_problem(413, detail)
        return None

    def _check_caller(self, scope: Scope, headers: Headers) -> None:
        host, origin = headers.get("host", ""), headers.get("origin")
        bound = scope["server"][0] if scope["server"] else None
        if re.sub(r":\d+$", "", host.lower()).strip("[]") not in self._hosts | {bound}:
            raise CallerRefused(
                f"{host!r} is not a name of this service",
                field="host",
                cure="call it by another name, or add this one to QUARRY_ALLOWED_HOSTS",
            )
        own = origin in (None, f"http://{host}", f"https://{host}")
        site = headers.get("sec-fetch-site", "same-origin" if own else "cross-site")
        if scope["method"] not in READING and site not in ("none", "same-origin"):
            raise CallerRefused(
                f"a page of {origin or 'another site'} may not change anything here",
                field="origin",
                cure="send it from a program, or from a page of this service",
            )

    def _guarded(self, scope: Scope, receive: Receive, send: Send) -> tuple[Receive, Send]:
        """Wrap both so that an answer costs no more than it may.

        An answer sent before the body was read closes the connection, so the rest is not parsed. A large one
        is sent in parts, each once the one before was taken; until then it counts in its caller's budget.
        """
        headers, state = Headers(scope=scope), scope.setdefault("state", {})
        is_read = "transfer-encoding" not in headers and headers.get("content-length", "0") == "0"
        start: Message | None = None
        left: int | None = None

        async def reading() -> Message:
            nonlocal is_read
            message = await receive()
            is_read = is_read or not message.get("more_body", False)
            return message

        async def answering(message: Message) -> None:
            nonlocal start, left
            if message["type"] == "http.response.start":
                closing = [] if is_read else [(b"connection", b"close")]
                start = {**message, "headers": [*message.get("headers", ()), *closing]}
                length = Headers(raw=start["headers"]).get("content-length")
                left = None if length is None else int(length)
                if left is not None:
                    return  # sent with its body, or replaced by a refusal
            body, more = message.get("body", b""), message.get("more_body", False)
            if left is not None and message["type"] == "http.response.body":
                if left == 0 and start is None:
                    return  # it ended with its last byte: the caller may have sent the next request since
                left -= len(body)
                more = more and left > 0
            with ExitStack() as taken:
                if start is not None and len(body) > PART_BYTES and "caller" in state:
                    try:
                        taken.enter_context(
                            self._budget.taking(state["caller"].owner, Taken.BYTES, len(body))
                        )
                    except QuotaExceeded as refused:
                        await problem_response(refused.problem())(scope, receive, send)
                        return
                if start is not None:
                    await send(start)
                    start = None
                if message["type"] == "http.response.body":
                    for at in range(0, len(body) or 1, PART_BYTES):
                        part, is_more = body[at : at + PART_BYTES], more or at + PART_BYTES < len(body)
                        await send({"type": message["type"], "body": part, "more_body": is_more})

        return reading, answering
