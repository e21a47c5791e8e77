"""What `GET /jobs/{id}/events` sends: state changes and progress, numbered so that a client can resume."""

from datetime import datetime
from typing import Literal

from schemas.base import Wire
from schemas.job import JobState, Problem, Progress


class Event(Wire):
    """One event of one job. `id` grows within a job; it is the SSE id that `Last-Event-ID` resumes after.

    `problem` is set while work is tried again after a problem that may pass; the next event without one says
    that it continues.
    """

    id: int
    at: datetime
    kind: Literal["state", "progress", "unit"]
    state: JobState
    progress: Progress
    problem: Problem | None = None
    message: str = ""
