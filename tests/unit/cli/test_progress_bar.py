"""What somebody who waits sees: a bar on a terminal, few and telling lines elsewhere."""

import io
import re

import pytest

from schemas.job import JobState, JobSummary, Progress
from service.cli.jobs import fields
from service.cli.progress_bar import LINE_EVERY_S, Bar, Lines, amounts, counts, progress_display
from service.errors import HubUnavailable
from tests.support.api import job_summary as job


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_a_terminal_gets_a_bar_and_a_file_gets_lines():
    assert isinstance(progress_display(Terminal()), Bar)
    assert isinstance(progress_display(io.StringIO()), Lines)


def test_a_line_is_written_at_each_state_and_then_now_and_again():
    stream, clock = io.StringIO(), Clock()
    lines = Lines(stream, clock)
    with lines:
        lines.show(job(JobState.QUEUED))
        lines.show(job(samples_planned=4))
        lines.show(job(samples_planned=9))
        clock.now_s += LINE_EVERY_S
        lines.show(job(samples_planned=9, samples_written=2, plan_done=True))
        clock.now_s += LINE_EVERY_S
        lines.show(job(samples_planned=9, samples_written=2, plan_done=True))
    assert stream.getvalue().splitlines() == [
        "queued: 0/0+ samples, 0 tokens, 0 bytes",
        "running: 0/4+ samples, 0 tokens, 0 bytes",
        "running: 2/9 samples, 0 tokens, 0 bytes",
    ]


def test_a_job_that_a_worker_rests_from_says_why():
    waiting = job().model_copy(update={"waits": "worker a's engine dies: why"})
    stream = io.StringIO()
    Lines(stream, Clock()).show(waiting)
    assert (
        stream.getvalue() == "running: 0/0+ samples, 0 tokens, 0 bytes; waits: worker a's engine dies: why\n"
    )
    assert fields(waiting)[-1] == "worker a's engine dies: why"


def standing_still() -> JobSummary:
    problem = HubUnavailable("the Hub answered [/502]").problem()
    return job(JobState.PUBLISHING).model_copy(update={"problem": problem})


def test_a_push_that_stands_still_says_why_at_once_and_that_it_goes_on():
    stream = io.StringIO()
    lines = Lines(stream, Clock())
    for shown in (job(JobState.PUBLISHING), standing_still(), standing_still(), job(JobState.PUBLISHING)):
        lines.show(shown)
    going = "publishing: 0/0+ samples, 0 tokens, 0 bytes"
    still = f"{going}; retrying: the Hub answered [/502]"
    assert stream.getvalue().splitlines() == [going, still, going]


DONE = {"samples_planned": 9, "samples_written": 8, "samples_rejected": 1, "plan_done": True}


@pytest.mark.parametrize(
    ("shown", "texts"),
    [
        (standing_still(), ["retrying"]),
        (job(JobState.COMPLETED, **DONE), ["completed", "8/9 samples, 1 rejected"]),
    ],
)
def test_a_bar_shows_state_and_counts_and_why_a_push_stands_still(shown, texts):
    stream = Terminal()
    with Bar(stream) as bar:
        bar.show(shown)
    for text in texts:
        assert text in stream.getvalue().replace("\n", " ")


def test_a_full_bar_has_another_colour_than_an_empty_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TERM", "xterm")  # of 16 colours, as screen and tmux are by default
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.delenv("COLORTERM", raising=False)
    bars = []
    for written in (0, 9):
        stream = Terminal()
        with Bar(stream) as bar:
            bar.show(job(samples_planned=9, samples_written=written, plan_done=True))
        bars.append(re.findall(r"\x1b\[([0-9;]+)m\u2501", stream.getvalue())[-1])
    assert bars[0] != bars[1]


def test_what_is_not_written_is_not_counted_as_written():
    assert amounts(Progress(tokens_written=12345, bytes_written=1536)) == "12,345 tokens, 1.5 kB"
    left_out = Progress(samples_planned=6, samples_rejected=2, samples_known=30, samples_given_up=4)
    assert counts(left_out) == "0/6+ samples, 2 rejected, 30 known, 4 given up"


def test_what_is_watched_says_how_fast_it_is_and_what_is_left_to_upload():
    stream, clock = io.StringIO(), Clock()
    lines = Lines(stream, clock)
    for seconds in range(0, 120, 10):
        clock.now_s = 100.0 + seconds
        lines.show(job(tokens_written=min(seconds, 30) * 1000, units_done=3, units_stored=1))
    written = stream.getvalue().splitlines()
    assert [line.partition("tokens, 0 bytes")[2] for line in written[:2]] == ["", ", 1,000 tokens/s"]
    stream.truncate(0)
    pushed = job(units_done=3, units_stored=1).model_copy(update={"repository": "org/states"})
    with Bar(Terminal()) as bar:
        bar.show(pushed)
    Lines(stream, clock).show(pushed)
    assert stream.getvalue().rstrip().endswith(", 2 units to upload")
