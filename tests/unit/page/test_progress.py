"""A job's counters in words."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from schemas.events import Event
from schemas.job import JobState, Progress
from service.page.progress import numbers, rates, share_done, waits_for
from service.report.wording import number
from service.store import JobRow
from tests.support.store_cases import PROBLEM

NOW = datetime(2026, 11, 1, tzinfo=UTC)
JOB = JobRow(
    **dict.fromkeys(("identity", "provenance", "hub_commit", "repository", "waits", "owner", "problem")),
    id="j-0000000000000000",
    state=JobState.QUEUED,
    priority=0,
    model="org/model",
    source_kind="inline",
    request_sha256="",
    progress=Progress(),
    created_at=NOW,
    updated_at=NOW,
)


def event(seconds_ago: float, tokens: int, state: JobState = JobState.RUNNING, *, done: bool = True) -> Event:
    progress = Progress(
        plan_done=done, tokens_planned=10_000, tokens_written=tokens, bytes_written=8 * tokens
    )
    at = NOW - timedelta(seconds=seconds_ago)
    return Event(id=1, at=at, kind="unit", state=state, progress=progress)


@pytest.mark.parametrize(
    ("events", "rate", "left"),
    [
        ([event(20, 0), event(10, 1000)], "50", "3 min"),
        ([event(20, 0), event(10, 1000, done=False)], "50", "-"),
        ([event(7200, 0), event(7100, 100)], "0.01389", "198 h 0 min"),
        ([event(20, 500), event(10, 500)], "0", "-"),
        ([event(10, 1000)], "-", "-"),
        ([event(20, 0), event(10, 1000, JobState.PAUSED)], "-", "-"),
        ([], "-", "-"),
    ],
)
def test_a_rate_is_over_all_the_time_since_the_first_event(events: list[Event], rate: str, left: str):
    told = rates(events, NOW)
    assert (told["rate"], told["left"]) == (rate, left)


@pytest.mark.parametrize(
    ("progress", "state", "share"),
    [
        (Progress(), JobState.QUEUED, 0.0),
        (Progress(samples_planned=8, samples_written=3, samples_rejected=1), JobState.RUNNING, 0.5),
        (Progress(samples_planned=8, samples_written=3, samples_given_up=1), JobState.CANCELLED, 0.5),
        (Progress(samples_planned=1, samples_written=3), JobState.RUNNING, 1.0),
        (Progress(samples_known=8), JobState.COMPLETED, 1.0),
    ],
)
def test_what_is_rejected_or_given_up_is_done_too(progress: Progress, state: JobState, share: float):
    assert share_done(progress, state) == share
    assert float(numbers(progress, state)["done"]) == share


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({}, "a planner that is free"),
        ({"state": JobState.RUNNING}, "its plan"),
        ({"progress": Progress(units_planned=1)}, "a worker that is free"),
        ({"progress": Progress(units_planned=1), "state": JobState.RUNNING}, None),
        ({"waits": "disk"}, "disk"),
        ({"state": JobState.BLOCKED, "problem": PROBLEM}, "why"),
        ({"state": JobState.PAUSED, "problem": PROBLEM}, "somebody who resumes it"),
        ({"state": JobState.COMPLETED}, None),
    ],
)
def test_a_job_says_for_what_it_waits(changes: dict[str, object], cause: str | None):
    assert waits_for(replace(JOB, **changes)) == cause


def test_a_rate_is_of_the_time_since_the_job_runs_again_and_never_below_zero():
    paused = [event(3000, 100), event(2000, 200, JobState.PAUSED), event(60, 200), event(0, 1400)]
    assert rates(paused, NOW)["rate"] == number(20.0)
    assert rates([event(60, 500), event(0, 100)], NOW)["rate"] == number(0)
    assert rates([event(60, 100), event(30, 200, JobState.PAUSED), event(0, 200)], NOW)["rate"] == "-"
