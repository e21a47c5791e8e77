"""GET /jobs/{id}/events: every event once, in order, resumed after any of them, ended with the job."""

from pathlib import Path

import httpx2
import pytest

from schemas.events import Event
from schemas.job import JobState, JobSummary, Problem
from service.store import Store, jobs
from tests.support.api import (
    api_settings,
    begin,
    complete,
    events_of,
    job_body,
    problem_of,
    server_and_client,
    small_target,
)
from tests.support.store_cases import stop_job


def test_a_finished_job_sends_all_its_events_in_order_or_those_after_any_of_them(
    api: httpx2.Client, store: Store, job: JobSummary
):
    """`Last-Event-ID` wins over the query."""
    complete(store, job.id)
    path = f"/jobs/{job.id}/events"
    response = api.get(path)
    assert response.headers["content-type"].startswith("text/event-stream")
    events = events_of(response)
    assert [event.id for event in events] == list(range(1, len(events) + 1))
    assert (events[0].state, events[-1].state) == (JobState.QUEUED, JobState.COMPLETED)
    middle = {"Last-Event-ID": str(events[3].id)}
    assert events_of(api.get(path, headers=middle)) == events[4:]
    assert events_of(api.get(path, params={"after": events[3].id})) == events[4:]
    assert events_of(api.get(path, params={"after": 0}, headers=middle)) == events[4:]
    assert events_of(api.get(path, params={"after": events[-1].id})) == []


def test_events_are_sent_while_the_job_goes_on(api: httpx2.Client, store: Store, job: JobSummary):
    """1. A client listens to a queued job. 2. What happens reaches it. 3. The stream ends with the job."""
    with api.stream("GET", f"/jobs/{job.id}/events") as response:
        lines = (line for line in response.iter_lines() if line.startswith("data: "))
        events = (Event.model_validate_json(line.removeprefix("data: ")) for line in lines)
        assert next(events).state is JobState.QUEUED
        begin(store, job.id)
        assert next(events).state is JobState.RUNNING
        store.write(jobs.cancel, job.id)
        *_, last = events
    assert last.state is JobState.CANCELLED


def test_a_blocked_job_ends_its_stream_and_a_resumed_one_goes_on_from_there(
    api: httpx2.Client, store: Store, job: JobSummary
):
    begin(store, job.id)
    waits = Problem(type="urn:quarry:disk-full", title="The disk is full", status=507, detail="no space")
    stop_job(store, job.id, problem=waits)
    before = events_of(api.get(f"/jobs/{job.id}/events"))
    assert (before[-1].state, before[-1].problem) == (JobState.BLOCKED, waits)
    store.write(jobs.resume, job.id)
    store.write(jobs.cancel, job.id)
    after = events_of(api.get(f"/jobs/{job.id}/events", headers={"Last-Event-ID": str(before[-1].id)}))
    assert [event.state for event in after] == [JobState.QUEUED, JobState.CANCELLED]


@pytest.mark.parametrize("value", ["x", "-1", str(2**63)])
def test_an_event_id_that_cannot_be_is_refused(api: httpx2.Client, job: JobSummary, value: str):
    path = f"/jobs/{job.id}/events"
    assert problem_of(api.get(path, headers={"Last-Event-ID": value}), 422).field == "last-event-id"
    assert problem_of(api.get(path, params={"after": value}), 422).field == "after"


def test_open_streams_end_with_the_server_and_do_not_hold_it_up(tmp_path: Path):
    """1. A client listens to a job that stands still. 2. The server ends. 3. The stream ends in order."""
    with server_and_client(api_settings(tmp_path)) as (server, api):
        made = api.post("/extract", json=job_body(small_target(tmp_path / "model"))).json()
        with api.stream("GET", f"/jobs/{made['id']}/events") as response:
            lines = response.iter_lines()
            assert next(lines) == "event: state"
            server.should_exit = True
            assert sum(line.startswith("data: ") for line in lines) == 1
