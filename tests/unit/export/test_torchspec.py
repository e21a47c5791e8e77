"""Masks as run lengths."""

import pytest
from hypothesis import given, strategies as st

from service.export.formats.torchspec import packed


@pytest.mark.parametrize(
    ("mask", "lengths"),
    [([0, 0, 1, 1, 1, 0, 0, 1, 1, 0], "2,3,2,2,1"), ([1, 1, 0], "0,2,1"), ([0], "1"), ([1], "0,1"), ([], "")],
)
def test_lengths_alternate_and_begin_with_zeros(mask, lengths):
    assert packed(mask) == lengths


@given(st.lists(st.integers(0, 1), min_size=1))
def test_lengths_give_the_mask_back(mask):
    runs = [int(length) for length in packed(mask).split(",")]
    assert [number % 2 for number, length in enumerate(runs) for _ in range(length)] == mask
