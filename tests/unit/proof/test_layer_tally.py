import math

import numpy as np
import pytest
from hypothesis import given, strategies as st

from service.proof.layer_tally import BINS, PLACES, LayerTally, bin_edge, bin_of, place_begin, place_of


def counted(*values: float) -> LayerTally:
    tally = LayerTally()
    np.add.at(tally.counts_PB[0], bin_of(np.array(values, np.float32)), 1)
    return tally


@given(st.floats(1e-6, 1e11))
def test_a_root_mean_square_lies_between_the_edges_of_its_bin(value):
    (number,) = bin_of(np.array([value], np.float32)).tolist()
    assert bin_edge(number) * (1 - 1e-5) <= value < bin_edge(number + 1) * (1 + 1e-5)


@pytest.mark.parametrize(
    ("value", "number"), [(0.0, 0), (1e-30, 0), (1e30, BINS - 1), (math.inf, BINS - 1), (math.nan, BINS - 1)]
)
def test_what_is_outside_falls_into_the_first_or_the_last_bin(value, number):
    assert bin_of(np.array([value], np.float32)).tolist() == [number]


def test_quantiles_are_those_of_the_values_within_a_bin():
    values = np.exp(np.random.default_rng(1).normal(1, 1, 20_000))
    shares = (0.01, 0.25, 0.5, 0.75, 0.99)
    assert counted(*values).rms(shares) == pytest.approx(np.quantile(values, shares), rel=0.02)


def test_quantiles_of_zero_and_infinite_tokens_say_so():
    assert counted(0, 0, 1, math.inf, math.nan).rms((0.2, 0.9)) == [0.0, math.inf]
    assert all(math.isnan(value) for value in counted().rms((0.1, 0.5)))


def test_the_first_tokens_have_places_of_their_own_and_later_ones_share_an_octave():
    places = place_of(np.array([0, 1, 2, 3, 4, 7, 8, 15, 16, 1023, 1024, 2**40]))
    assert places.tolist() == [0, 1, 2, 3, 4, 4, 5, 5, 6, 11, 12, PLACES - 1]


@given(st.integers(0, 2**22))
def test_a_place_begins_with_the_smallest_token_of_it(token):
    place = int(place_of(np.array([token]))[0])
    assert place_begin(place) <= token
    assert place == PLACES - 1 or token < place_begin(place + 1)
