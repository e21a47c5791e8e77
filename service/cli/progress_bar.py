"""Shows a job's progress to whoever waits for it: a bar on a terminal, a line now and then elsewhere."""

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self, TextIO

from schemas.events import Event
from schemas.job import JobState, Progress
from service.visible import one_line

LINE_EVERY_S = 5.0


class ProgressDisplay(Protocol):
    """Takes the events of one job, each when it is seen and the last one until there is another."""

    def __enter__(self) -> Self:
        """Begin to show."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the screen clean."""

    def show(self, event: Event) -> None:
        """Show how the job stands; the same event may be shown again and again."""


class Bar:
    """A live bar of samples, drawn by rich."""

    def __init__(self, stream: TextIO) -> None:
        """Draw on `stream`, a terminal."""
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress as RichProgress,
            TextColumn,
            TimeRemainingColumn,
        )

        self._rich = RichProgress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[amounts]}"),
            TimeRemainingColumn(),
            console=Console(file=stream),
        )
        self._task = self._rich.add_task(JobState.QUEUED.value, total=None, amounts="")

    def __enter__(self) -> Self:
        """Begin to draw."""
        self._rich.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the last bar on the screen."""
        self._rich.stop()

    def show(self, event: Event) -> None:
        """Move the bar. Its length is known when planning is done."""
        progress = event.progress
        self._rich.update(
            self._task,
            description=f"{event.state.value}{_delay(event)}",
            total=progress.samples_planned if progress.plan_done else None,
            completed=progress.samples_written + progress.samples_rejected,
            amounts=amounts(progress),
        )


class Lines:
    """A plain line at each change of state and at each delay, and one every few seconds between."""

    def __init__(self, stream: TextIO, clock_s: Callable[[], float] = time.monotonic) -> None:
        """Write to `stream`; `clock_s` gives seconds from any beginning."""
        self._stream, self._clock_s = stream, clock_s
        self._stands: tuple[JobState, str] | None = None
        self._told_at, self._line = 0.0, ""

    def __enter__(self) -> Self:
        """Do nothing."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Do nothing."""

    def show(self, event: Event) -> None:
        """Write a line if it says something new and is due."""
        progress = event.progress
        done = progress.samples_written + progress.samples_rejected
        planned = f"{progress.samples_planned}{'' if progress.plan_done else '+'}"
        line = f"{event.state.value}: {done}/{planned} samples, {amounts(progress)}{_delay(event)}"
        now, stands = self._clock_s(), (event.state, _delay(event))
        due = stands != self._stands or now - self._told_at >= LINE_EVERY_S
        if due and line != self._line:
            self._stands, self._told_at, self._line = stands, now, line
            print(line, file=self._stream, flush=True)


def _delay(event: Event) -> str:
    """Say why a job that goes on by itself stands still now; nothing where it does not."""
    if event.delay is None or event.problem is None:
        return ""
    return f"; tried again since {event.delay.since:%H:%M} UTC: {one_line(event.problem.detail)}"


def progress_display(stream: TextIO = sys.stderr) -> ProgressDisplay:
    """Return what fits `stream`."""
    return Bar(stream) if stream.isatty() else Lines(stream)


def amounts(progress: Progress) -> str:
    """Return `12,345 tokens, 1.2 GiB`, with the rejected samples where there are any."""
    told = f"{progress.tokens_written:,} tokens, {readable_bytes(progress.bytes_written)}"
    return f"{told}, {progress.samples_rejected} rejected" if progress.samples_rejected else told


def readable_bytes(num_bytes: int) -> str:
    """Return `num_bytes` in the largest binary unit that leaves at least 1."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
