"""Refuses what a web page of another site makes a browser send: the API asks nobody who they are."""

import re

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from service.api.problems import problem_response
from service.errors import CallerRefused
from service.settings import Settings

LOOPBACK = ("localhost", "127.0.0.1", "::1")
PROBES = frozenset({"/healthz", "/readyz", "/metrics"})
"""They are asked by address, and say nothing of any job."""
READING = frozenset({"GET", "HEAD", "OPTIONS"})


class CallerCheck:
    """ASGI middleware: the Host must be a name of this service, and a change must not come from another site.

    A page whose own name was made to lead here passes a browser's check of origins: its Host tells it.
    """

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        self._hosts = {name.lower() for name in (*LOOPBACK, settings.host, *settings.allowed_hosts)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 403."""
        if scope["type"] == "http" and scope["path"] not in PROBES:
            try:
                self._check(scope)
            except CallerRefused as refused:
                await problem_response(refused.problem())(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
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
