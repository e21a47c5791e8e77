"""The event stream of the pages: it signals that something has changed, and the page reloads itself."""

import asyncio
import time
from collections.abc import AsyncIterator

from fastapi import Request
from fastapi.sse import EventSourceResponse, ServerSentEvent
from starlette.concurrency import run_in_threadpool

from schemas.keys import Scope
from service.api.routes.jobs import ASK_AGAIN_S
from service.api.routes.resources import CallerOf, StoreOf
from service.errors import KeyRefused, StoreUnavailable
from service.page.session import pages
from service.store import Store, jobs

EVERY_S = 4.0
"""How often a page's stream checks for changes; a hundred commits in between are one message."""
SHARED_S = 2.0
"""How long a read of the store, which covers all jobs of an owner, is shared with the owner's other pages."""

Looks = dict[str | None, tuple[float, tuple[int, int]]]
"""When the store was last read and the result, by owner; None for all jobs."""

router = pages(Scope.JOBS_READ)


@router.get("/ui/events", response_class=EventSourceResponse)
async def follow(request: Request, store: StoreOf, asks: CallerOf) -> AsyncIterator[ServerSentEvent]:
    """Send an event when one of the caller's jobs is new or changed.

    Ends when the key is revoked or the server stops.
    """
    seen, asked_s = None, time.monotonic()
    while not request.app.state.stopping():
        try:
            if time.monotonic() - asked_s > ASK_AGAIN_S:
                await run_in_threadpool(request.state.ask_again)
                asked_s = time.monotonic()
            newest = await run_in_threadpool(_newest, request.app.state.looks, store, asks.sees_only)
        except (KeyRefused, StoreUnavailable):
            return  # the browser reconnects and gets the error
        if newest != seen:
            yield ServerSentEvent(raw_data="changed")
        seen = newest
        await asyncio.sleep(EVERY_S)


def _newest(looks: Looks, store: Store, owner: str | None) -> tuple[int, int]:
    """Return a value that changes with each event of these jobs, at most `SHARED_S` old."""
    now_s = time.monotonic()
    if owner not in looks or now_s - looks[owner][0] > SHARED_S:
        looks[owner] = now_s, store.read(jobs.num_events, owner)
    return looks[owner][1]
