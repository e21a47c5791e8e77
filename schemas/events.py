"""What `GET /jobs/{id}/events` sends: state changes and progress, numbered so that a client can resume."""

from datetime import datetime
from typing import Literal

from schemas.base import Wire
from schemas.job import JobState, Problem, Progress


class Event(Wire):
    """One event of one job. `id` increases within a job; it is the SSE id that `Last-Event-ID` resumes after.

    `problem` is set while work is retried after a transient problem; the next event without one means that
    it continues.
    """

    id: int
    at: datetime
    kind: Literal["state", "progress", "unit"]
    state: JobState
    progress: Progress
    problem: Problem | None = None
    message: str = ""
