"""The event stream against a real store: nothing twice, nothing lost, whatever becomes of the job."""

import asyncio
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from sqlalchemy import Text, cast, update

from schemas.events import Event
from schemas.job import JobState
from schemas.names import job_id_from_content
from schemas.request import ExtractRequest
from service.api import sse
from service.api.sse import EventFeed
from service.errors import QuarryError, StoreUnavailable
from service.settings import Settings
from service.store import NewJob, Store, deletion, jobs
from service.store.tables import EVENT
from tests.support.api import api_settings, job_body, stored

JOB = job_id_from_content("key")


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return api_settings(tmp_path)


@pytest.fixture
def store(settings: Settings, tmp_path: Path) -> Iterator[Store]:
    with stored(settings) as store:
        store.write(jobs.submit, NewJob.of(JOB, "key", ExtractRequest.model_validate(job_body(tmp_path))))
        yield store


def test_more_events_than_a_page_are_sent_each_once(store: Store, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sse, "PAGE_EVENTS", 4)
    for _ in range(4):
        store.write(jobs.cancel, JOB)
        store.write(jobs.resume, JOB)
    store.write(jobs.cancel, JOB)

    async def collect() -> list[int]:
        events = EventFeed(store, lambda: False).follow(JOB, store.read(jobs.state, JOB), 0)
        return [int(event.id or 0) async for event in events]

    assert anyio.run(collect) == list(range(1, 11))


def test_a_job_that_was_resumed_since_is_followed_on(store: Store):
    """1. The job is seen cancelled. 2. It is resumed before its events are read. 3. The stream goes on."""
    store.write(jobs.cancel, JOB)
    seen_as = store.read(jobs.state, JOB)
    store.write(jobs.resume, JOB)

    async def follow() -> list[str | None]:
        seen = []
        async for one in EventFeed(store, lambda: False).follow(JOB, seen_as, 0):
            seen.append(one.id)
            if len(seen) == 3:
                await anyio.to_thread.run_sync(store.write, jobs.cancel, JOB)
        return seen

    assert anyio.run(follow) == ["1", "2", "3", "4"]


@pytest.mark.parametrize(("heard", "heard_then"), [(1, ["2"]), (2, []), (3, ["1", "2"])])
def test_a_listener_that_heard_more_than_there_is_hears_all(
    store: Store, heard: int, heard_then: list[str]
) -> None:
    """As after a backup was restored. The job is seen running, and ends before its events are read."""
    store.write(jobs.cancel, JOB)

    async def follow() -> list[str | None]:
        events = EventFeed(store, lambda: False).follow(JOB, JobState.RUNNING, after=heard)
        async with asyncio.timeout(10):
            return [event.id async for event in events]

    assert asyncio.run(follow()) == heard_then


def test_a_hundred_listeners_ask_the_store_no_more_than_one(store: Store, settings: Settings):
    """1. Listeners of two jobs read what is stored. 2. Both go on. 3. Each hears all, once, in order."""
    other = job_id_from_content("other")
    request = ExtractRequest.model_validate(job_body(settings.data_dir))
    store.write(jobs.submit, NewJob.of(other, "other", request))
    counting = CountingStore(settings.database())
    try:
        heard = asyncio.run(follow_all(counting, [JOB, other], listeners=100))
    finally:
        counting.close()
    assert heard == [list(range(1, 13))] * 100
    # One each for what was there before, and one each tick for all of them.
    assert counting.reads < 2 * 100


class CountingStore(Store):
    """Counts what is read."""

    reads = 0

    def read(self, *args: Any, **kwargs: Any) -> Any:
        self.reads += 1
        return super().read(*args, **kwargs)


async def follow_all(store: CountingStore, ids: list[str], listeners: int) -> list[list[int]]:
    """Let listeners follow the jobs until they are cancelled; return the numbers of the events of each."""
    feed = EventFeed(store, lambda: False)

    async def listen(number: int) -> list[int]:
        events = feed.follow(ids[number % len(ids)], JobState.QUEUED, after=0)
        return [int(event.id or 0) async for event in events]

    tasks = [asyncio.create_task(listen(number)) for number in range(listeners)]
    while store.reads < listeners + 2:
        await asyncio.sleep(0.01)
    for job_id in ids:
        for priority in range(1, 11):
            await asyncio.to_thread(store.write, jobs.set_priority, job_id, priority)
        await asyncio.to_thread(store.write, jobs.cancel, job_id)
    return await asyncio.gather(*tasks)


def test_a_listener_of_a_job_that_is_deleted_before_its_end_was_read_ends(store: Store):
    async def follow() -> list[str | None]:
        kinds = []
        async for event in EventFeed(store, lambda: False).follow(JOB, JobState.QUEUED, after=0):
            kinds.append(event.event)
            if len(kinds) == 1:
                begin = partial(deletion.begin, with_dataset=False)
                for verb in (jobs.cancel, begin, deletion.forget):
                    await asyncio.to_thread(store.write, verb, JOB)
        return kinds

    assert asyncio.run(follow()) == ["state"]


def test_a_listener_that_falls_behind_hears_everything_all_the_same(store: Store):
    async def follow() -> tuple[list[str | None], list[str | None]]:
        feed = EventFeed(store, lambda: False)
        fast, slow = (feed.follow(JOB, JobState.QUEUED, after=0) for _ in range(2))
        quick, late = [(await anext(fast)).id], [(await anext(slow)).id]
        for priority in range(1, 4):
            await asyncio.to_thread(store.write, jobs.set_priority, JOB, priority)
            quick.append((await anext(fast)).id)
        late += [(await anext(slow)).id for _ in range(3)]
        await asyncio.to_thread(store.write, jobs.cancel, JOB)
        return quick + [event.id async for event in fast], late + [event.id async for event in slow]

    assert asyncio.run(follow()) == (["1", "2", "3", "4", "5"], ["1", "2", "3", "4", "5"])


def test_events_that_cannot_be_read_end_the_listeners_of_their_job_alone(store: Store, settings: Settings):
    """1. One job is followed, and a unit of another awaited. 2. That one's events turn out to be damaged."""
    other = job_id_from_content("other")
    request = ExtractRequest.model_validate(job_body(settings.data_dir))
    store.write(jobs.submit, NewJob.of(other, "other", request))
    with store.writing() as tx:
        tx.connection.execute(update(EVENT).where(EVENT.c.job_id == other).values(entry=cast("{", Text)))

    async def follow() -> list[str | None]:
        feed = EventFeed(store, lambda: False)
        heard = []
        async for event in feed.follow(JOB, JobState.QUEUED, after=0):
            heard.append(event.id)
            if len(heard) == 1:
                with pytest.raises(QuarryError, match=f"of job {other} cannot be read"):
                    await feed.newer(other, 0)
                await asyncio.to_thread(store.write, jobs.cancel, JOB)
        return heard

    assert asyncio.run(follow()) == ["1", "2"]


class FailingStore(Store):
    """Fails when it is asked for the new events of all jobs, `failures` times."""

    error: Exception = StoreUnavailable("away")
    failures = 0

    def read(self, verb: Any, *args: Any, **kwargs: Any) -> Any:
        if verb is jobs.new_events and self.failures:
            self.failures -= 1
            raise self.error
        return super().read(verb, *args, **kwargs)


async def last_state(store: Store, job_id: str) -> str | None:
    """Follow a job, which is cancelled once its first event is heard; return the state of the last one."""
    last = None
    async for event in EventFeed(store, lambda: False).follow(job_id, JobState.QUEUED, after=0):
        if last is None:
            await asyncio.to_thread(store.write, jobs.cancel, job_id)
        last = Event.model_validate_json(event.raw_data or "").state
    return last


def test_listeners_wait_for_a_database_that_is_away_and_end_with_any_other_error(
    settings: Settings, store: Store
):
    failing = FailingStore(settings.database())
    try:
        failing.failures = 2
        assert asyncio.run(last_state(failing, JOB)) == JobState.CANCELLED
        store.write(jobs.resume, JOB)
        failing.failures, failing.error = 1, LookupError("a mistake")
        with pytest.raises(LookupError):
            asyncio.run(last_state(failing, JOB))
    finally:
        failing.close()
