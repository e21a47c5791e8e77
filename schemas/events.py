"""What `GET /jobs/{id}/events` sends: state changes and progress, numbered so that a client can resume."""

from datetime import datetime
from typing import Literal

from schemas.base import Wire
from schemas.job import JobState, Problem, Progress


class Delay(Wire):
    """Since when the publishing of a job stands still; the `problem` beside it says why.

    `reached` is how far it had got: the files that it had uploaded and those that it had committed, added up.
    """

    since: datetime
    reached: int


class Event(Wire):
    """One event of one job. `id` grows within a job; it is the SSE id that `Last-Event-ID` resumes after.

    `delay` stands where publishing met a problem that may pass and is tried again; the next event without a
    problem says that it goes on.
    """

    id: int
    at: datetime
    kind: Literal["state", "progress", "unit"]
    state: JobState
    progress: Progress
    problem: Problem | None = None
    message: str = ""
    delay: Delay | None = None
