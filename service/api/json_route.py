"""A route whose body FastAPI reads, and which is refused as that of POST /extract if it is not JSON."""

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response

from service.api.head_route import HeadRoute
from service.control.request_body import parse_json


class JsonRoute(HeadRoute):
    """Refuses what is not JSON, or has a field twice, before FastAPI reads it.

    FastAPI names a byte's position as the field, and takes the last of several.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return what answers a request."""
        handle = super().get_route_handler()
        if self.body_field is None:
            return handle

        async def answer(request: Request) -> Response:
            if raw := await request.body():
                parse_json(raw)
            return await handle(request)

        return answer
