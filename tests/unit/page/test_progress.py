"""A job's counters in words."""

from datetime import UTC, datetime, timedelta

import pytest

from schemas.events import Event
from schemas.job import JobState, Progress
from service.page.answers import length_of_time
from service.page.progress import rates, share_done, waits_for
from tests.support.api import job_summary
from tests.support.store_cases import PROBLEM

NOW = datetime(2026, 11, 1, tzinfo=UTC)
JOB = job_summary(JobState.QUEUED)


def event(
    seconds_ago: float,
    tokens: int,
    state: JobState = JobState.RUNNING,
    *,
    plan_done: bool = True,
    **more: int,
) -> Event:
    """Return an event of a job of 100 samples, of which those that are written have 100 tokens each."""
    written = {"tokens_written": tokens, "bytes_written": 8 * tokens, "samples_written": tokens // 100}
    progress = Progress(plan_done=plan_done, samples_planned=100, **written, **more)
    at = NOW - timedelta(seconds=seconds_ago)
    return Event(id=1, at=at, kind="unit", state=state, progress=progress)


@pytest.mark.parametrize(
    ("events", "tokens_s", "left_s"),
    [
        ([event(10, 1000), event(20, 0)], 50, 180),
        ([event(10, 1000, plan_done=False), event(20, 0)], 50, None),
        ([event(10, 1000, samples_rejected=40, samples_given_up=10), event(20, 0)], 50, 20 * 40 / 60),
        ([event(0, 10_000), event(20, 0)], 500, None),
        ([event(10, 500), event(20, 500)], 0, None),
        ([event(0, 100), event(60, 500)], 0, None),
        (
            [event(0, 1400), event(60, 200), event(2000, 200, JobState.PAUSED), event(3000, 100)],
            20,
            60 * 86 / 12,
        ),
    ],
)
def test_a_rate_is_over_the_time_since_the_job_runs(
    events: list[Event], tokens_s: float, left_s: float | None
):
    seen = rates(events, NOW)
    assert seen is not None
    assert (seen.tokens_s, seen.bytes_s, seen.left_s) == (tokens_s, 8 * tokens_s, left_s)


@pytest.mark.parametrize(
    "events",
    [
        [],
        [event(10, 1000)],
        [event(10, 1000, JobState.PAUSED), event(20, 0)],
        [event(0, 200), event(30, 200, JobState.PAUSED), event(60, 100)],
    ],
)
def test_a_job_that_does_not_run_has_no_rate(events: list[Event]):
    assert rates(events, NOW) is None


def test_a_rate_falls_while_no_event_comes():
    events = [event(10, 1000), event(20, 0)]
    seen = [rates(events, NOW + timedelta(seconds=later)) for later in (0, 80, 180)]
    assert [(one.tokens_s, one.left_s) for one in seen if one] == [(50, 180), (10, 900), (5, 1800)]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (119, "119 s"), (120, "2 min"), (7199, "120 min"), (7200, "2 h"), (200_000, "2 d")],
)
def test_a_length_of_time_has_two_of_its_unit(seconds: float, text: str):
    assert length_of_time(seconds) == text


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


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({}, "a worker that plans"),
        ({"state": JobState.RUNNING}, "its plan"),
        ({"progress": Progress(units_planned=1)}, "a worker that is free"),
        ({"progress": Progress(units_planned=1), "state": JobState.RUNNING}, None),
        ({"waits": "disk"}, "disk"),
        ({"state": JobState.BLOCKED, "problem": PROBLEM}, "why"),
        ({"state": JobState.PAUSED, "problem": PROBLEM}, "someone to resume it"),
        ({"state": JobState.COMPLETED}, None),
    ],
)
def test_a_job_says_for_what_it_waits(changes: dict[str, object], cause: str | None):
    assert waits_for(JOB.model_copy(update=changes)) == cause
