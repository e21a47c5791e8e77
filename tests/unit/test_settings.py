"""What a setting becomes where nobody set it."""

import os

import pytest

from service.settings import Settings


@pytest.mark.parametrize(
    ("cores", "ranks", "writers"),
    [(1, 1, 2), (2, 1, 2), (8, 1, 4), (16, 1, 8), (128, 1, 8), (128, 8, 8), (64, 8, 4), (16, 8, 2)],
)
def test_writers_follow_a_ranks_share_of_the_cores(monkeypatch, cores, ranks, writers):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    assert Settings(tensor_parallel_size=ranks).writers() == writers
    assert Settings(tensor_parallel_size=ranks, writer_threads=3).writers() == 3
