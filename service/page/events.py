"""The event stream of a page: the numbers of its jobs in words, as the page itself would show them."""

import json
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping
from datetime import UTC, datetime
from typing import Annotated

from fastapi import Query, Request
from fastapi.sse import EventSourceResponse, ServerSentEvent
from starlette.concurrency import run_in_threadpool

from schemas.events import Event
from schemas.keys import Scope
from schemas.names import JOB_ID_PATTERN
from service.api.routes.jobs import ASK_AGAIN_S
from service.api.routes.resources import CallerOf, StoreOf
from service.api.sse import EventFeed
from service.errors import KeyRefused, StoreUnavailable
from service.page.jobs import EVENTS_SHOWN
from service.page.progress import numbers, rates
from service.page.session import pages
from service.store import jobs

EVERY_S = 1.0
"""Between two messages: nobody reads numbers faster, and a hundred commits cost as much as one."""

router = pages(Scope.JOBS_READ)


@router.get("/ui/events", response_class=EventSourceResponse)
async def follow_jobs(
    request: Request,
    store: StoreOf,
    asks: CallerOf,
    job: Annotated[list[Annotated[str, Query(pattern=JOB_ID_PATTERN)]], Query(min_length=1, max_length=200)],
) -> AsyncIterator[ServerSentEvent]:
    """Send the changed numbers of the jobs that a page shows, until the key is revoked or the server ends."""
    feed: EventFeed = request.app.state.feed
    newest = await run_in_threadpool(store.read, jobs.newest_events, job, asks.sees_only)
    recent = {job_id: deque((event,), EVENTS_SHOWN) for job_id, event in newest.items()}
    for only in recent if len(recent) == 1 else ():  # of many no rate is shown
        events = await run_in_threadpool(store.read, jobs.recent_events, only, EVENTS_SHOWN)
        recent[only] = deque(events, EVENTS_SHOWN)
    yield _message(recent, newest)
    asked_s = time.monotonic()
    async for later in feed.changes(newest, EVERY_S):
        if time.monotonic() - asked_s > ASK_AGAIN_S:
            try:
                await run_in_threadpool(request.state.ask_again)
            except (KeyRefused, StoreUnavailable):
                return  # the browser comes back, and is told
            asked_s = time.monotonic()
        if later:
            yield _message(recent, later)


def _message(recent: dict[str, deque[Event]], later: Mapping[str, Event]) -> ServerSentEvent:
    now, words = datetime.now(UTC), {}
    for job_id, event in later.items():
        if event.id > recent[job_id][-1].id:
            recent[job_id].append(event)
        words[job_id] = numbers(event.progress, event.state) | rates(recent[job_id], now)
    return ServerSentEvent(raw_data=json.dumps(words))
