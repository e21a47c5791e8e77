"""Asks each request for its API key: `Security(caller, scopes=[...])` on a route."""

import time
from collections import Counter
from typing import Annotated, cast

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer, SecurityScopes

from schemas.keys import Scope
from service.api.routes.resources import SettingsOf, StoreOf
from service.control.keys import Caller, authenticate
from service.errors import CallerRefused, QuotaExceeded

BEARER = HTTPBearer(auto_error=False, description="an API key, `qk_...`; none is needed on the loopback")


class RequestCounts:
    """The requests of each key's name in this minute. Threads may lose a count, which does no harm."""

    def __init__(self) -> None:
        """Begin at none."""
        self._minute, self._counts = 0, Counter[str]()

    def add(self, name: str, limit: int) -> None:
        """Count a request. Raises QuotaExceeded above `limit` in the minute."""
        minute = int(time.monotonic() // 60)
        if minute != self._minute:
            self._minute, self._counts = minute, Counter()
        self._counts[name] += 1
        if self._counts[name] > limit:
            cure = "send it again in the next minute"
            raise QuotaExceeded(f"{limit} requests a minute are allowed", field="Authorization", cure=cure)


def caller(
    request: Request,
    required: SecurityScopes,
    given: Annotated[HTTPAuthorizationCredentials | None, Depends(BEARER)],
    store: StoreOf,
    settings: SettingsOf,
) -> Caller:
    """Return who asks, if the key has all required scopes.

    Raises KeyRefused, CallerRefused, QuotaExceeded.
    """
    sender = authenticate(store, settings, given.credentials if given else None)
    request.state.caller = sender
    for scope in required.scopes:
        if not sender.may(Scope(scope)):
            cure = "ask an admin for a key with that scope"
            raise CallerRefused(f"the key has no scope {scope!r}", field="Authorization", cure=cure)
    if sender.owner is not None and sender.grants.requests_per_minute is not None:
        counts = cast(RequestCounts, request.app.state.request_counts)
        counts.add(sender.owner, sender.grants.requests_per_minute)
    return sender
