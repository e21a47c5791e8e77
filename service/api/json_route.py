"""A route whose body FastAPI reads, and which is refused as that of POST /extract if it is not JSON."""

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import HTTPException, Request, Response

from service.api.head_route import HeadRoute
from service.control.request_body import parse_json


def check_is_json(request: Request) -> None:
    """Raise HTTPException unless a request says that its body is JSON.

    A page of another origin cannot say so without a preflight.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise HTTPException(415, f"the body's content type is {kind or 'not given'}")


class JsonRoute(HeadRoute):
    """Refuses a body that is not JSON, or has a field twice, before FastAPI reads it.

    FastAPI names a byte's position as the field, takes the last of several, and says of a body of another
    type that it is no object.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return what answers a request."""
        handle = super().get_route_handler()
        if self.body_field is None:
            return handle

        async def answer(request: Request) -> Response:
            if raw := await request.body():
                check_is_json(request)
                parse_json(raw)
            return await handle(request)

        return answer
