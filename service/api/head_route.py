"""A route whose GET is answered to HEAD as well; the server leaves the body out."""

from fastapi.routing import APIRoute
from fastapi.sse import EventSourceResponse
from starlette.routing import Match
from starlette.types import Receive, Scope, Send


class HeadRoute(APIRoute):
    """Takes HEAD for GET, but of an event stream, whose end would be waited for.

    HEAD is not among its methods: the API's document names those.
    """

    def _is_head(self, scope: Scope) -> bool:
        is_page = "GET" in self.methods and self.response_class is not EventSourceResponse
        return is_page and scope["type"] == "http" and scope["method"] == "HEAD"

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Say whether a request is for this route."""
        match, child = super().matches(scope)
        return Match.FULL if match is Match.PARTIAL and self._is_head(scope) else match, child

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer it."""
        if self._is_head(scope):
            await self.app(scope, receive, send)
        else:
            await super().handle(scope, receive, send)
