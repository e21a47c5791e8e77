"""What `GET /jobs/{id}/events` sends: state changes and progress, numbered so that a client can resume."""

from datetime import datetime
from typing import Literal

from schemas.base import Wire
from schemas.job import JobState, Problem, Progress


class Delay(Wire):
    """When publishing last made progress; the `problem` beside it says why it waits.

    `reached`: files uploaded plus files committed.
    """

    since: datetime
    reached: int


class Event(Wire):
    """One event of one job. `id` grows within a job; it is the SSE id that `Last-Event-ID` resumes after.

    `delay` is set while publishing is retried after a problem that may pass; the next event without a problem
    says that it continues.
    """

    id: int
    at: datetime
    kind: Literal["state", "progress", "unit"]
    state: JobState
    progress: Progress
    problem: Problem | None = None
    message: str = ""
    delay: Delay | None = None
