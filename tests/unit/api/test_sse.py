"""The event stream against a real store: nothing twice, nothing lost, whatever becomes of the job."""

from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from schemas.names import job_id_from_key
from schemas.request import ExtractRequest
from service.api import sse
from service.api.sse import job_events
from service.store import NewJob, Store, jobs
from tests.support.api import api_settings, job_body, stored

JOB = job_id_from_key("key")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with stored(api_settings(tmp_path)) as store:
        store.write(jobs.submit, NewJob.of(JOB, "key", ExtractRequest.model_validate(job_body(tmp_path))))
        yield store


def test_more_events_than_a_page_are_sent_each_once(store: Store, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sse, "PAGE_EVENTS", 4)
    for _ in range(4):
        store.write(jobs.cancel, JOB)
        store.write(jobs.resume, JOB)
    store.write(jobs.cancel, JOB)

    async def collect() -> list[int]:
        events = job_events(store, JOB, store.read(jobs.state, JOB), 0, lambda: False)
        return [int(event.id or 0) async for event in events]

    assert anyio.run(collect) == list(range(1, 11))


def test_a_job_that_was_resumed_since_is_followed_on(store: Store):
    """1. The job is seen cancelled. 2. It is resumed before its events are read. 3. The stream goes on."""
    store.write(jobs.cancel, JOB)
    seen_as = store.read(jobs.state, JOB)
    store.write(jobs.resume, JOB)

    async def follow() -> list[str | None]:
        seen = []
        async for one in job_events(store, JOB, seen_as, 0, lambda: False):
            seen.append(one.id)
            if len(seen) == 3:
                await anyio.to_thread.run_sync(store.write, jobs.cancel, JOB)
        return seen

    assert anyio.run(follow) == ["1", "2", "3", "4"]
