"""A job's events as server-sent events: what is stored, then what is added, until the job rests."""

from collections.abc import AsyncIterator
from threading import Event as Flag

from anyio import sleep
from fastapi.sse import ServerSentEvent
from starlette.concurrency import run_in_threadpool

from schemas.events import Event
from schemas.job import ENDED_JOB_STATES, JobState
from service.store import Store

POLL_S = 0.25
PAGE_EVENTS = 500

RESTING_JOB_STATES = ENDED_JOB_STATES | {JobState.BLOCKED}
"""States that no worker leaves: the stream ends there, so that a client needs no timeout to know."""


async def job_events(
    store: Store, job_id: str, state: JobState, after: int, stopping: Flag
) -> AsyncIterator[ServerSentEvent]:
    """Yield the events of `job_id` with an id above `after`, in order, each once.

    Ends when the job rests and all is sent, or when `stopping` is set (the server goes down; the client comes
    back with `Last-Event-ID`). Runs on the event loop and asks the store in a thread. `state` is the job's at
    some moment before this call; from then on its events tell it.
    """
    while not stopping.is_set():
        page = await run_in_threadpool(store.events, job_id, after=after, limit=PAGE_EVENTS)
        for event in page:
            yield sent(event)
            after, state = event.id, event.state
        if len(page) == PAGE_EVENTS:
            continue
        if state in RESTING_JOB_STATES:
            return
        await sleep(POLL_S)


def sent(event: Event) -> ServerSentEvent:
    """Return `event` as it goes over the wire."""
    return ServerSentEvent(raw_data=event.model_dump_json(), event=event.kind, id=str(event.id))
