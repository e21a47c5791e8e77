"""A job's progress, its speed, and what it is waiting for. Pure functions."""

from collections.abc import Sequence
from datetime import datetime
from itertools import takewhile
from typing import NamedTuple

from schemas.events import Event
from schemas.job import JobState, JobSummary, Progress

LEAST_S = 1.0
"""Minimum time over which a rate is computed."""
WAITS = {
    JobState.QUEUED: "a worker that is free",
    JobState.PAUSED: "someone to resume it",
    JobState.BLOCKED: "someone to resume it",
}


class Rates(NamedTuple):
    """What a job writes per second, and how long the rest takes at this rate, None if unknown."""

    tokens_s: float
    bytes_s: float
    left_s: float | None


def share_done(progress: Progress, state: JobState) -> float:
    """Return the share of the planned samples that is done (written, rejected or given up), 0 to 1."""
    if state is JobState.COMPLETED:
        return 1.0
    return min(1.0, _ended(progress) / progress.samples_planned) if progress.samples_planned else 0.0


def _ended(progress: Progress) -> int:
    return progress.samples_written + progress.samples_rejected + progress.samples_given_up


def rates(events: Sequence[Event], now: datetime) -> Rates | None:
    """Return a running job's speed since the oldest of its recent `events`, which are newest first.

    Rates fall while no events arrive, since the time is up to `now`. None if the job is not running.
    """
    running = list(takewhile(lambda event: event.state is JobState.RUNNING, events))
    if len(running) < 2:
        return None
    last, first = running[0].progress, running[-1].progress
    passed_s = max(LEAST_S, (now - running[-1].at).total_seconds())
    # The count can fall if a host is lost.
    ended = max(0, _ended(last) - _ended(first))
    left = last.samples_planned - _ended(last)
    return Rates(
        max(0, last.tokens_written - first.tokens_written) / passed_s,
        max(0, last.bytes_written - first.bytes_written) / passed_s,
        left * passed_s / ended if last.plan_done and ended and left > 0 else None,
    )


def waits_for(job: JobSummary) -> str | None:
    """Return what a job that makes no progress is waiting for, or None if nothing is known to hold it up."""
    if job.waits is not None:
        return job.waits
    if job.state in {JobState.QUEUED, JobState.RUNNING} and not job.progress.units_planned:
        return "its plan" if job.state is JobState.RUNNING else "a worker that plans"
    if job.problem is not None and job.state in {JobState.BLOCKED, JobState.FAILED}:
        return job.problem.detail
    return WAITS.get(job.state)
