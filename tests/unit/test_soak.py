"""The soak's arithmetic and samples; no engine, and no claim about a time."""

import json
from pathlib import Path

import pytest

from benchmarks.service_jobs import Job, tenths, write_samples
from benchmarks.soak import LONGEST, SHORTEST, WORK, growth, rate_ratio, report


def job(rate: float, held: list[float] | None = None) -> Job:
    return Job(10, 1000, 1000 / rate, rate, 2 * 10**9, held or [1e9] * 10)


def test_tenths_are_means_in_their_order() -> None:
    samples = [(float(second), second) for second in range(25)]
    means = tenths(samples)
    assert means[0] == 0.5 and means[-1] == 23.0
    assert means == sorted(means)


def test_a_job_that_was_too_short_says_nothing_of_its_memory() -> None:
    assert tenths([(0.0, 1)] * 9) == []
    with pytest.raises(ValueError, match="too short"):
        growth(Job(1, 1, 1.0, 1.0, 1, []))


def test_the_long_job_is_held_against_the_mean_of_both_around_it() -> None:
    assert rate_ratio([job(90.0), job(99.0), job(110.0)]) == pytest.approx(0.99)


def test_memory_that_grows_with_the_job_shows_and_the_first_tenth_does_not_count() -> None:
    assert growth(job(1.0, [0.5e9] + [1e9] * 9)) == 1.0
    assert growth(job(1.0, [1e9 + step * 1e8 for step in range(10)])) > 1.5


def test_the_report_names_the_ratio_and_the_growth() -> None:
    said = report([job(100.0), job(50.0, [1e9] * 9 + [2e9]), job(100.0)])
    assert "0.500 of the mean" in said and "2.000 of the second" in said
    assert "1.00 1.00" in said


def test_samples_are_those_of_the_seed_and_their_tokens_are_counted(tmp_path: Path) -> None:
    count = write_samples(tmp_path / "one", WORK, 50, seed=1)
    write_samples(tmp_path / "two", WORK, 50, seed=1)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    rows = [json.loads(line)["token_ids"] for line in (tmp_path / "one").read_text().splitlines()]
    assert sum(map(len, rows)) == count
    assert all(SHORTEST <= len(row) <= LONGEST for row in rows)
