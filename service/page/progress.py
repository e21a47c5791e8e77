"""A job's counters in words: what the pages show, and what their event stream replaces. Pure."""

from collections.abc import Sequence
from datetime import datetime

from schemas.events import Event
from schemas.job import ENDED_JOB_STATES, JobState, Problem, Progress
from service.report.wording import count, number, percent, size
from service.store import JobRow

LEAST_S = 1.0
"""Of the time that a rate is over."""
WAITS = {
    JobState.QUEUED: "a worker that is free",
    JobState.PAUSED: "somebody who resumes it",
    JobState.BLOCKED: "somebody who resumes it",
}


def share_done(progress: Progress, state: JobState) -> float:
    """Return which part of the planned samples is written or rejected, 0 to 1."""
    if state is JobState.COMPLETED:
        return 1.0
    ended = progress.samples_written + progress.samples_rejected + progress.samples_given_up
    return min(1.0, ended / progress.samples_planned) if progress.samples_planned else 0.0


def numbers(progress: Progress, state: JobState) -> dict[str, str]:
    """Return the counters by the name that an element on a page has for them."""
    done = share_done(progress, state)
    more = "" if progress.plan_done or state in ENDED_JOB_STATES else " so far"
    waiting = progress.units_planned - progress.units_done - progress.units_failed
    return {
        "state": state,
        "done": f"{done:.4f}",
        "share": percent(done),
        "written": count(progress.samples_written),
        "planned": f"{count(progress.samples_planned)}{more}",
        "rejected": count(progress.samples_rejected),
        "tokens": count(progress.tokens_written),
        "tokens_planned": f"{count(progress.tokens_planned)}{more}",
        "bytes": size(progress.bytes_written),
        "units_done": count(progress.units_done),
        "units_planned": f"{count(progress.units_planned)}{more}",
        "units_failed": count(progress.units_failed),
        "units_open": count(waiting),
        "units_stored": count(progress.units_stored),
    }


def rates(events: Sequence[Event], now: datetime) -> dict[str, str]:
    """Return what is written a second since the first of these events, and how long the rest takes so."""
    stopped = [place for place, event in enumerate(events) if event.state is not JobState.RUNNING]
    events = list(events)[stopped[-1] + 1 if stopped else 0 :]
    if len(events) < 2:
        return {"rate": "-", "rate_bytes": "-", "left": "-"}
    first, last = events[0].progress, events[-1].progress
    passed_s = max(LEAST_S, (now - events[0].at).total_seconds())
    # Fewer where a host was lost.
    tokens_s = max(0, last.tokens_written - first.tokens_written) / passed_s
    bytes_s = max(0, last.bytes_written - first.bytes_written) / passed_s
    left = last.tokens_planned - last.tokens_written
    return {
        "rate": number(tokens_s),
        "rate_bytes": size(round(bytes_s)),
        "left": _duration(left / tokens_s) if tokens_s > 0 and left > 0 and last.plan_done else "-",
    }


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{max(1, minutes)} min"


def waits_for(job: JobRow) -> str | None:
    """Say for what a job waits that is not worked on; none where nothing is known to hold it up."""
    problem: Problem | None = job.problem
    if job.waits is not None:
        return job.waits
    if job.state in {JobState.QUEUED, JobState.RUNNING} and not job.progress.units_planned:
        return "its plan" if job.state is JobState.RUNNING else "a planner that is free"
    if problem is not None and job.state in {JobState.BLOCKED, JobState.FAILED}:
        return problem.detail
    return WAITS.get(job.state)
