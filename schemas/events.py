"""What `GET /jobs/{id}/events` sends: state changes and progress, numbered so that a client can resume."""

from datetime import datetime

from schemas.base import OpenEnum, Wire
from schemas.job import JobState, Problem, Progress


class EventKind(OpenEnum):
    """What an event is of: the job's state, a unit, or anything else."""

    STATE = "state"
    PROGRESS = "progress"
    UNIT = "unit"


class Event(Wire):
    """One event of one job. `id` increases within a job; it is the SSE id that `Last-Event-ID` resumes after.

    `problem` is set while work is retried after a transient problem; the next event without one means that
    it continues.
    """

    id: int
    at: datetime
    kind: EventKind
    state: JobState
    progress: Progress
    problem: Problem | None = None
    message: str = ""
