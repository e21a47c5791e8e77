"""The event stream against a real store: nothing twice, nothing lost, an end with the job or the server."""

from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest
from fastapi.sse import ServerSentEvent

from schemas.names import job_id_from_key
from schemas.request import ExtractRequest
from service.api.sse import PAGE_EVENTS, job_events
from service.store import Store
from tests.support.api import api_settings, complete, job_body, stored

JOB = job_id_from_key("key")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with stored(api_settings(tmp_path)) as store:
        store.submit(JOB, "key", ExtractRequest.model_validate(job_body(tmp_path)))
        yield store


def stream(store: Store, *, after: int = 0) -> list[ServerSentEvent]:
    """Return everything a stream that begins now sends."""

    async def collect() -> list[ServerSentEvent]:
        state = store.state(JOB)
        return [one async for one in job_events(store, JOB, state, after, lambda: False)]

    return anyio.run(collect)


def test_more_events_than_a_page_are_sent_each_once(store: Store):
    for _ in range(PAGE_EVENTS):
        store.cancel(JOB)
        store.resume(JOB)
    store.cancel(JOB)
    ids = [int(one.id or 0) for one in stream(store)]
    assert ids == list(range(1, 2 * PAGE_EVENTS + 3))


def test_a_stream_that_begins_at_the_last_event_of_a_finished_job_is_empty(store: Store):
    complete(store, JOB)
    last = store.events(JOB)[-1].id
    assert stream(store, after=last) == []
    assert [one.id for one in stream(store, after=last - 1)] == [str(last)]


def test_a_job_that_was_resumed_since_is_followed_on(store: Store):
    """1. The job is seen cancelled. 2. It is resumed before its events are read. 3. The stream goes on."""
    store.cancel(JOB)
    seen_as = store.state(JOB)
    store.resume(JOB)

    async def follow() -> list[str | None]:
        seen = []
        async for one in job_events(store, JOB, seen_as, 0, lambda: False):
            seen.append(one.id)
            if len(seen) == 3:
                await anyio.to_thread.run_sync(store.cancel, JOB)
        return seen

    assert anyio.run(follow) == ["1", "2", "3", "4"]
