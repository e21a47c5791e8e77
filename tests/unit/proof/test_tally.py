import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from schemas.dataset.shard import LightRow
from service.proof.layer_tally import BINS, PLACES, LayerTally, bin_edge, bin_of, place_begin, place_of
from service.proof.logit_check import LogitReading, LogitVerdict
from service.proof.tally import (
    MAX_FAULTY_POINTS,
    MAX_POINTS,
    SAMPLES,
    SHARE_BINS,
    Few,
    JobTally,
)


def light(name: str, ids: list[int], mask: list[int]) -> LightRow:
    return LightRow(
        name, None, len(ids), len(ids), 4, np.array(ids, np.int32), np.array(mask, np.uint8), (1, 2)
    )


def verdict(number: int) -> LogitVerdict:
    """One right row and one wrong one."""
    right = LogitReading(f"row {number}", -1.0, -1.0 - number, 0.1, True, None, 0.0)
    wrong = replace(right, fault="off")
    return LogitVerdict(2, 2, float(number), (f"row {number}: off",), (right, wrong))


def count(tally: JobTally | LayerTally, states_TH: torch.Tensor) -> None:
    low_T, high_T = torch.aminmax(states_TH, dim=1)
    if isinstance(tally, JobTally):
        tally.layer(1, states_TH, low_T, high_T)
    else:
        tally.add(states_TH, low_T, high_T)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_token_is_counted_by_its_root_mean_square(dtype):
    states_TH = torch.randn(300, 64, generator=torch.Generator().manual_seed(1)).mul(3).to(dtype)
    tally = LayerTally()
    count(tally, states_TH)
    due = states_TH.double().square().mean(dim=1).sqrt().quantile(torch.tensor([0.1, 0.5, 0.9]).double())
    assert tally.tokens == 300
    assert tally.rms((0.1, 0.5, 0.9)) == pytest.approx(due.tolist(), rel=0.03)
    assert tally.max_abs == float(states_TH.abs().max())
    assert tally.faults(1) == {}


def test_tokens_that_cannot_be_right_are_counted_apart():
    states_TH = torch.randn(40, 8, generator=torch.Generator().manual_seed(1))
    states_TH[3:7] = 0
    states_TH[10] = -2.5
    states_TH[20, 4] = math.nan
    states_TH[21, 4] = math.inf
    tally = LayerTally()
    count(tally, states_TH)
    assert tally.faults(1) == {"all zero": 4, "constant": 1, "not finite": 2}
    assert tally.faults(0) == {"not finite": 2}
    assert tally.max_abs == float(states_TH[states_TH.isfinite()].abs().max())
    assert tally.counts_PB[:, 0].sum() == 4
    assert tally.counts_PB[:, -1].sum() == 2


def test_a_layer_of_nothing_finite_has_no_largest_value():
    tally = LayerTally()
    count(tally, torch.full((3, 4), math.nan))
    assert (tally.max_abs, tally.not_finite, tally.constant) == (0.0, 3, 0)


def test_tokens_are_counted_by_their_place_in_the_row():
    tally = LayerTally()
    for _ in range(5):
        states_TH = torch.ones(6, 4)
        states_TH[:, 0] = 2
        states_TH[0] *= 1000
        count(tally, states_TH)
    assert tally.counts_PB.sum(axis=1)[:6].tolist() == [5, 5, 5, 5, 10, 0]
    assert tally.rms((0.5,), place=0)[0] == pytest.approx(1000 * math.sqrt(7 / 4), rel=0.03)


def test_of_many_rows_all_are_counted_and_a_few_are_kept():
    tally = JobTally()
    for number in range(2 * MAX_POINTS):
        tally.row("data/a", number, light(f"s{number}", [7, 8, 9], [0, 1, 1]))
        tally.logits("data/a", verdict(number))
    assert (tally.rows, tally.tokens, tally.supervised_tokens) == (2000, 6000, 4000)
    assert tally.supervised.counts() == {8: 2000, 9: 2000}
    assert (tally.logit_rows, tally.logit_argmax_agree, tally.logit_max_error) == (4000, 4000, 1999.0)
    assert len(tally.findings) == 2000
    assert len(tally.points.items()) == MAX_POINTS
    assert len(tally.faulty_points.items()) == MAX_FAULTY_POINTS
    assert len(tally.samples.items()) == SAMPLES


def test_what_is_kept_does_not_depend_on_the_order():
    forwards, backwards = Few[int](10), Few[int](10)
    for number in range(1000):
        forwards.add(f"{number}", number)
        backwards.add(f"{999 - number}", 999 - number)
    assert forwards.items() == backwards.items()
    assert max(forwards.items()) > 500


@pytest.mark.parametrize(
    ("supervised", "number"), [(0, 0), (1, 0), (50, 10), (99, 19), (100, SHARE_BINS - 1)]
)
def test_a_row_is_counted_by_its_supervised_share(supervised, number):
    tally = JobTally()
    tally.row("data/a", 0, light("a", [1] * 100, [1] * supervised + [0] * (100 - supervised)))
    assert tally.shares.tolist() == [int(bar == number) for bar in range(SHARE_BINS)]
    assert tally.unsupervised_rows == (supervised == 0)


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 16, 17, 100, 5000])
def test_of_a_long_row_the_first_tokens_and_some_others_are_measured(num_tokens):
    tally = LayerTally()
    count(tally, torch.ones(num_tokens, 8192))
    assert min(num_tokens, 8) <= tally.tokens <= 16
    assert tally.counts_PB[:4].sum() == min(num_tokens, 4)


def test_what_is_measured_is_spread_over_the_whole_row():
    tally = LayerTally()
    states_TH = torch.ones(4096, 8192)
    states_TH[2048:] = 4
    count(tally, states_TH)
    assert [tally.rms((share,))[0] for share in (0.4, 0.95)] == pytest.approx([1, 4], rel=0.1)


def test_a_bad_token_of_a_long_row_is_known_even_if_it_is_not_measured():
    states_TH = torch.randn(999, 4096, generator=torch.Generator().manual_seed(1))
    states_TH[500] = 0
    states_TH[777, 5] = math.nan
    states_TH[888, 5] = 1e6
    tally = LayerTally()
    count(tally, states_TH)
    assert tally.tokens < 999
    assert tally.faults(1) == {"all zero": 1, "not finite": 1}
    assert tally.max_abs == 1e6


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


@given(st.integers(0, 2**22))
def test_a_place_begins_with_the_smallest_token_of_it(token):
    place = int(place_of(np.array([token]))[0])
    assert place_begin(place) <= token
    assert place == PLACES - 1 or token < place_begin(place + 1)
