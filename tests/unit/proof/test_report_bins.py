import math

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from service.proof.report.bins import (
    BINS,
    PLACES,
    bin_edge,
    norm_bins,
    place_begin,
    place_of,
    quantiles,
)


def bins(*norms: float, dtype: torch.dtype = torch.float32) -> list[int]:
    return norm_bins(torch.tensor(norms, dtype=dtype)).tolist()


def counted(*norms: float, dtype: torch.dtype = torch.float32) -> np.ndarray:
    return np.bincount(bins(*norms, dtype=dtype), minlength=BINS)


@given(st.floats(1e-6, 1e13))
def test_a_norm_lies_between_the_edges_of_its_bin(norm):
    (number,) = bins(norm)
    assert bin_edge(number) * (1 - 1e-6) <= norm < bin_edge(number + 1) * (1 + 1e-6)


@given(st.integers(1, BINS - 2))
def test_an_edge_belongs_to_the_bin_that_it_begins_in_every_dtype(number):
    edge = bin_edge(number)
    assert bins(edge) == bins(edge, dtype=torch.bfloat16) == [number]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("norm", "number"),
    [
        (0.0, 0),
        (1e-30, 0),
        (1e30, BINS - 1),
        (math.inf, BINS - 1),
        (math.nan, BINS - 1),
        (-math.nan, BINS - 1),
    ],
)
def test_what_is_outside_falls_into_the_first_or_the_last_bin(norm, number, dtype):
    assert bins(norm, dtype=dtype) == [number]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantiles_are_those_of_the_norms_within_a_bin(dtype):
    norms = np.exp(np.random.default_rng(1).normal(1, 1, 20_000))
    shares = (0.01, 0.25, 0.5, 0.75, 0.99)
    found = quantiles(counted(*norms, dtype=dtype), shares)
    assert found == pytest.approx(np.quantile(norms, shares), rel=0.02)


def test_norms_rounded_to_bfloat16_fill_their_bins_like_others():
    norms = np.linspace(64, 128, 100_000)
    rounded, exact = counted(*norms, dtype=torch.bfloat16), counted(*norms)
    inside = exact > exact.max() / 2
    assert rounded[inside] == pytest.approx(exact[inside], rel=0.1)


def test_quantiles_of_zero_and_infinite_tokens_say_so():
    assert quantiles(counted(0, 0, 1, math.inf, math.nan), (0.2, 0.9)) == [0.0, math.inf]
    assert all(math.isnan(value) for value in quantiles(counted(), (0.1, 0.5)))


def test_the_first_tokens_have_places_of_their_own_and_later_ones_share_an_octave():
    places = place_of(np.array([0, 1, 2, 3, 4, 7, 8, 15, 16, 1023, 1024]))
    assert places.tolist() == [0, 1, 2, 3, 4, 4, 5, 5, 6, 11, 12]


@given(st.integers(0, 2**22))
def test_a_place_begins_with_the_smallest_token_of_it(token):
    place = int(place_of(np.array([token]))[0])
    assert place < PLACES
    assert place_begin(place) <= token
    assert place == PLACES - 1 or token < place_begin(place + 1)


def test_a_row_however_long_has_a_last_place():
    assert place_of(np.array([2**40])).tolist() == [PLACES - 1]
