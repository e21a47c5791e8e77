"""The soak's arithmetic and samples; no engine, and no claim about a time."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.service_jobs import Job, tenths, write_samples
from benchmarks.soak import LONGEST, SHORTEST, WORK, Round, growth, pace, rate_ratio, summary

EVEN = [(float(tenth), tenth * 10) for tenth in range(1, 11)]
"""Ten samples committed in every second of a job of 100."""


def job(
    rate: float, held: Sequence[float] = (1e9,) * 10, committed: Sequence[tuple[float, int]] = EVEN
) -> Job:
    return Job(100, 1000, 1000 / rate, rate, 2 * 10**9, list(held), list(committed))


def test_a_job_that_was_too_short_says_nothing_of_its_memory_or_its_pace() -> None:
    assert tenths([(0.0, 1)] * 9) == []
    with pytest.raises(ValueError, match="too short"):
        growth(job(1.0, held=[]))
    with pytest.raises(ValueError, match="1 commits are too few"):
        pace(job(1.0, committed=[(1.0, 100)]))
    with pytest.raises(ValueError, match="0 commits are too few"):
        pace(job(1.0, committed=[]))


def test_the_long_job_is_held_against_the_short_ones_together() -> None:
    # 1000 tokens at 50 a second and 1000 at 100 a second: 2000 in 30 seconds.
    assert rate_ratio(Round([job(50.0), job(100.0)], job(66.0))) == pytest.approx(0.99)


def test_memory_that_grows_with_the_job_shows_and_the_first_tenth_does_not_count() -> None:
    assert growth(job(1.0, [0.5e9] + [1e9] * 9)) == 1.0
    assert growth(job(1.0, [1e9 + step * 1e8 for step in range(10)])) > 1.5


def test_a_job_that_slows_shows_in_its_pace_and_its_start_and_end_do_not() -> None:
    assert pace(job(1.0)) == 1.0
    start_and_end = [(second + 30.0 + 50.0 * (second > 9), done) for second, done in EVEN]
    assert pace(job(1.0, committed=start_and_end)) == 1.0
    slower = [(second + max(0.0, second - 5.0), done) for second, done in EVEN]
    assert pace(job(1.0, committed=slower)) == 0.5


def test_what_every_job_leaves_behind_shows_in_the_last_one() -> None:
    first, last = Round([job(1.0)] * 2, job(1.0)), Round([job(1.0), job(1.0, [1.2e9] * 10)], job(1.0))
    assert summary([first, last])["drift"].median == pytest.approx(1.2)


def test_samples_are_those_of_the_seed_and_their_tokens_are_counted(tmp_path: Path) -> None:
    count = write_samples(tmp_path / "one", WORK, 50, "short-1-0")
    write_samples(tmp_path / "two", WORK, 50, "short-1-0")
    write_samples(tmp_path / "other", WORK, 50, "short-1-1")
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    assert (tmp_path / "one").read_bytes() != (tmp_path / "other").read_bytes()
    rows = [json.loads(line)["token_ids"] for line in (tmp_path / "one").read_text().splitlines()]
    assert sum(map(len, rows)) == count
    assert all(SHORTEST <= len(row) <= LONGEST for row in rows)
