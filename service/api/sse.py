"""Jobs' events as server-sent events: first the stored ones, then new ones, until the job rests."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from fastapi.sse import ServerSentEvent
from starlette.concurrency import run_in_threadpool

from schemas.events import Event
from schemas.job import RESTING_JOB_STATES, JobState
from service.errors import QuarryError, StoreUnavailable
from service.store import Store, jobs

POLL_S = 0.25
PAGE_EVENTS = 500


@dataclass
class _Followed:
    """A job with listeners: its newest events, read once for all listeners, and the id of the last.

    `error` says why they cannot be read, and is raised to these listeners alone.
    """

    last: int = 0
    newest: list[Event] = field(default_factory=list)
    error: QuarryError | None = None
    exists: bool = True
    listeners: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def wake(self) -> None:
        """Make every listener look again."""
        self.changed.set()
        self.changed = asyncio.Event()


class EventFeed:
    """The events of all jobs that have listeners, read by one task. Lives on the event loop.

    Once listeners have read the earlier events, they cost the store no reads of their own.
    """

    def __init__(self, store: Store, stopping: Callable[[], bool]) -> None:
        """Read nothing yet. `stopping` returns whether the server is shutting down; listeners end then."""
        self._store, self._stopping = store, stopping
        self._followed: dict[str, _Followed] = {}
        self._reader: asyncio.Task[None] | None = None

    async def follow(
        self, job_id: str, state: JobState, after: int, quiet_s: float | None = None
    ) -> AsyncIterator[ServerSentEvent | None]:
        """Yield the job's events with an id above `after`, in order, each once; None after `quiet_s`.

        Ends once the job rests and all events are sent, or when the server shuts down: the client reconnects
        with `Last-Event-ID`. `state` is the job's state at some moment before this call. If the job never had
        an event `after`, as where a backup was restored since, all its events are sent.
        """
        page = await self._stored(job_id, after - 1)
        if not page:
            after, page = 0, await self._stored(job_id, 0)
        while page:
            for event in page:
                if event.id > after:
                    yield _message(event)
                after, state = event.id, event.state
            page = [] if len(page) < PAGE_EVENTS or self._stopping() else await self._stored(job_id, after)
        with self._following(job_id) as job:
            while job.exists and not self._stopping():
                if job.last > after:
                    missed = job.newest[0].id > after + 1
                    for event in await self._stored(job_id, after) if missed else job.newest:
                        if event.id > after:
                            yield _message(event)
                            after, state = event.id, event.state
                elif state in RESTING_JOB_STATES:
                    return
                else:
                    try:
                        async with asyncio.timeout(quiet_s):
                            await job.changed.wait()
                    except TimeoutError:
                        yield None
                    self._check(job)

    async def newer(self, job_id: str, than: int) -> int:
        """Wait for an event of `job_id` with an id above `than`; return the newest event's id.

        Returns an older id if the job is gone or the server shuts down.
        """
        with self._following(job_id) as job:
            while job.exists and job.last <= than and not self._stopping():
                await job.changed.wait()
                self._check(job)
            return job.last

    def _check(self, job: _Followed) -> None:
        """Raise the error that ended the reader, if one did, or that of the job's events."""
        if job.error is not None:
            raise job.error
        if self._reader is not None and self._reader.done():
            self._reader.result()

    async def _stored(self, job_id: str, after: int) -> list[Event]:
        return await run_in_threadpool(self._store.read, jobs.events, job_id, after=after, limit=PAGE_EVENTS)

    @contextmanager
    def _following(self, job_id: str) -> Iterator[_Followed]:
        job = self._followed.setdefault(job_id, _Followed())
        job.listeners += 1
        if self._reader is None or self._reader.done():
            self._reader = asyncio.create_task(self._read())
        try:
            yield job
        finally:
            job.listeners -= 1
            if not job.listeners:
                del self._followed[job_id]

    async def _read(self) -> None:
        """Read the new events of all followed jobs at each tick, until nobody listens."""
        try:
            while self._followed and not self._stopping():
                await asyncio.sleep(POLL_S)
                last = {job_id: job.last for job_id, job in self._followed.items()}
                with suppress(StoreUnavailable):  # the next tick asks again
                    self._take(await run_in_threadpool(self._store.read, jobs.new_events, last, PAGE_EVENTS))
        finally:
            for job in self._followed.values():
                job.wake()

    def _take(self, new: dict[str, list[Event] | QuarryError | None]) -> None:
        for job_id, events in new.items():
            job = self._followed.get(job_id)
            if job is not None:
                job.exists = events is not None
                job.error = events if isinstance(events, QuarryError) else None
                if isinstance(events, list) and events:
                    job.newest, job.last = events, events[-1].id
                job.wake()


def _message(event: Event) -> ServerSentEvent:
    return ServerSentEvent(raw_data=event.model_dump_json(), event=event.kind, id=str(event.id))
