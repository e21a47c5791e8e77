"""What is said of many jobs, or of a state alone, comes from the jobs' own rows: it reads no request."""

import asyncio
from pathlib import Path

import pytest
from sqlalchemy import text

from schemas.job import JobState
from schemas.request import ExtractRequest
from schemas.source import FileSource, HubSource
from service.errors import NotFound
from service.settings import Settings
from service.store import NewJob, Store, jobs
from service.worker import _until_ended
from tests.support.roles import Capture, sweep
from tests.support.store_cases import PROBLEM, a_request, job_id, reach, submit


@pytest.fixture
def unreadable(store: Store, database: Store) -> Store:
    """The store of a job that has failed, whose request nobody can read."""
    reach(store, JobState.FAILED)
    spoil_requests(database)
    return store


def spoil_requests(database: Store) -> None:
    with database.writing() as tx:
        tx.connection.execute(text("UPDATE request SET body = 'unreadable'"))


def test_a_job_and_the_list_are_read_without_requests_and_say_the_same(unreadable: Store) -> None:
    (listed,), _ = unreadable.read(jobs.page)
    assert (listed.id, listed.state, listed.problem) == (job_id(1), JobState.FAILED, PROBLEM)
    assert (listed.model, listed.source_kind) == ("org/model", "inline")
    assert unreadable.read(jobs.job, job_id(1)) == listed
    with pytest.raises(NotFound):
        unreadable.read(jobs.job, job_id(2))


def test_the_loop_of_one_job_reads_no_request_while_it_waits(unreadable: Store, tmp_path: Path) -> None:
    capture = Capture(unreadable, Settings(data_dir=tmp_path), "worker", only_job=job_id(1))
    assert asyncio.run(capture._finished())


def test_the_sweeper_reads_no_request(unreadable: Store, tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path / "data")
    lost = settings.work_root / job_id(1) / "attempts" / "00000-1"
    lost.mkdir(parents=True)
    assert sweep(unreadable, settings) == [lost]


@pytest.mark.parametrize(
    "state", [JobState.COMPLETED, JobState.FAILED, JobState.CANCELLED, JobState.BLOCKED], ids=str
)
def test_waiting_for_a_jobs_end_reads_no_request(store: Store, database: Store, state: JobState) -> None:
    reach(store, state)
    spoil_requests(database)

    async def wait() -> None:
        async with asyncio.timeout(60):
            await _until_ended(store, job_id(1), asyncio.Event())

    asyncio.run(wait())


@pytest.mark.parametrize(
    "source",
    [
        FileSource(kind="file", path="/data/rows.jsonl"),
        HubSource(kind="hub", repo_id="org/data"),
        a_request().source,
    ],
    ids=lambda source: source.kind,
)
def test_a_listed_job_names_its_model_and_the_kind_of_its_source(store: Store, source) -> None:
    store.write(jobs.submit, NewJob.of(job_id(1), "key", ExtractRequest(model="org/another", source=source)))
    (listed,), _ = store.read(jobs.page)
    assert (listed.model, listed.source_kind) == ("org/another", source.kind)


def test_new_events_are_the_newest_of_each_job_and_say_which_jobs_are_gone(store: Store) -> None:
    ids = [submit(store, number).id for number in range(3)]
    for priority in range(1, 6):
        store.write(jobs.set_priority, ids[0], priority)
    new = store.read(jobs.new_events, {ids[0]: 2, ids[1]: 1, ids[2]: 0, "gone": 7}, 3)
    numbers = {
        job: [event.id for event in events] if isinstance(events, list) else events
        for job, events in new.items()
    }
    assert numbers == {ids[0]: [4, 5, 6], ids[2]: [1], "gone": None}
