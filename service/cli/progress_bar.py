"""Shows a job's progress: a bar on a terminal, a line every few seconds elsewhere."""

import time
from collections import deque
from collections.abc import Callable
from typing import Self, TextIO

import rich.progress
from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn

from schemas.job import JobState, JobSummary, Progress
from service.visible import one_line

LINE_EVERY_S = 5.0
RATE_OVER_S = 60.0


class Bar(rich.progress.Progress):
    """A live bar of samples. Like `Lines`, it is shown within its `with` block, and takes one job."""

    def __init__(self, stream: TextIO) -> None:
        """Draw on `stream`, a terminal."""
        self._rate = Rate(time.monotonic)
        super().__init__(
            TextColumn("{task.description}", markup=False),
            # rich's own colour of a full bar is that of an empty one where a terminal has 16 colours.
            BarColumn(bar_width=None, finished_style="green"),
            TextColumn("{task.fields[amounts]}"),
            TimeRemainingColumn(),
            console=Console(file=stream),
        )
        self._task = self.add_task(JobState.QUEUED.value, total=None, amounts="")

    def show(self, job: JobSummary) -> None:
        """Update the bar. Its length is known once planning is done."""
        progress = job.progress
        written = f"{counts(progress)}, {amounts(progress)}{self._rate.shown(progress.tokens_written)}"
        self.update(
            self._task,
            description=f"{job.state.value}{_delay(job)}",
            total=progress.samples_planned if progress.plan_done else None,
            completed=progress.samples_written + progress.samples_rejected,
            amounts=f"{written}{to_upload(job)}",
        )


class Lines:
    """Prints a line at each change of state or delay, and every few seconds in between."""

    def __init__(self, stream: TextIO, clock_s: Callable[[], float] = time.monotonic) -> None:
        """Write to `stream`; `clock_s` gives seconds from any starting point."""
        self._stream, self._clock_s = stream, clock_s
        self._rate = Rate(clock_s)
        self._state: tuple[JobState, str] | None = None
        self._written_s, self._line = 0.0, ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_raised: object) -> None:
        pass

    def show(self, job: JobSummary) -> None:
        """Print a line if it has changed and is due."""
        rate = self._rate.shown(job.progress.tokens_written)
        line = f"{job.state.value}: {counts(job.progress)}, {amounts(job.progress)}"
        now_s, state = self._clock_s(), (job.state, _delay(job))
        in_time = state != self._state or now_s - self._written_s >= LINE_EVERY_S
        if in_time and (line, state) != (self._line, self._state):
            self._state, self._written_s, self._line = state, now_s, line
            print(f"{line}{rate}{to_upload(job)}{_delay(job)}", file=self._stream, flush=True)


class Rate:
    """Tokens per second over the last minute of a watched job."""

    def __init__(self, clock_s: Callable[[], float]) -> None:
        self._clock_s = clock_s
        self._seen: deque[tuple[float, int]] = deque()

    def shown(self, tokens: int) -> str:
        """Record the tokens written so far and return `, 1,234 tokens/s`; empty while nothing is written."""
        now_s = self._clock_s()
        self._seen.append((now_s, tokens))
        while now_s - self._seen[0][0] > RATE_OVER_S:
            self._seen.popleft()
        first_s, first = self._seen[0]
        return f", {(tokens - first) / (now_s - first_s):,.0f} tokens/s" if tokens > first else ""


ProgressDisplay = Bar | Lines


def counts(progress: Progress) -> str:
    """Return `3/9 samples` written, or `3/9+` while planning goes on, with counts of those left out."""
    more = "" if progress.plan_done else "+"
    left_out = {
        "rejected": progress.samples_rejected,
        "known": progress.samples_known,
        "given up": progress.samples_given_up,
    }
    others = (f"{count} {name}" for name, count in left_out.items() if count)
    return ", ".join([f"{progress.samples_written}/{progress.samples_planned}{more} samples", *others])


def to_upload(job: JobSummary) -> str:
    """Return `, 2 units to upload`; empty if no committed unit waits for its repository."""
    lag = job.progress.units_done - job.progress.units_stored
    return f", {lag} unit{'s' * (lag > 1)} to upload" if job.repository and lag else ""


def _delay(job: JobSummary) -> str:
    """Say why a job does not proceed; empty if it makes progress."""
    if job.waits is not None:
        return f"; waits: {one_line(job.waits)}"
    if job.state is not JobState.PUBLISHING or job.problem is None:
        return ""
    return f"; retrying: {one_line(job.problem.detail)}"


def progress_display(stream: TextIO) -> ProgressDisplay:
    """Return the display that fits `stream`."""
    return Bar(stream) if stream.isatty() else Lines(stream)


def amounts(progress: Progress) -> str:
    """Return `12,345 tokens, 1.2 GB`."""
    return f"{progress.tokens_written:,} tokens, {decimal(progress.bytes_written)}"
