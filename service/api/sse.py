"""A job's events as server-sent events: what is stored, then what is added, until the job rests."""

from collections.abc import AsyncIterator, Callable

from anyio import sleep
from fastapi.sse import ServerSentEvent
from starlette.concurrency import run_in_threadpool

from schemas.job import RESTING_JOB_STATES, JobState
from service.store import Store, jobs

POLL_S = 0.25
PAGE_EVENTS = 500


async def job_events(
    store: Store, job_id: str, state: JobState, after: int, stopping: Callable[[], bool]
) -> AsyncIterator[ServerSentEvent]:
    """Yield the events of `job_id` with an id above `after`, in order, each once.

    Ends when no worker goes on with the job and all is sent, or when `stopping` says that the server ends:
    the client comes back with `Last-Event-ID`. Runs on the event loop and asks the store in a thread.
    `state` is the job's at some moment before this call; its events carry every later one.
    """
    while not stopping():
        page = await run_in_threadpool(store.read, jobs.events, job_id, after=after, limit=PAGE_EVENTS)
        for event in page:
            yield ServerSentEvent(raw_data=event.model_dump_json(), event=event.kind, id=str(event.id))
            after, state = event.id, event.state
        if len(page) == PAGE_EVENTS:
            continue
        if state in RESTING_JOB_STATES:
            return
        await sleep(POLL_S)
