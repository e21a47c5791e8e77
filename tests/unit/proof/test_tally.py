import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from schemas.dataset.shard import LightRow
from service.proof.layer_tally import LayerTally
from service.proof.logit_check import LogitReading, LogitVerdict
from service.proof.tally import (
    MAX_FAULTY_POINTS,
    MAX_POINTS,
    SAMPLES,
    SHARE_BINS,
    Few,
    JobTally,
)


def light(name: str, ids: list[int], mask: list[int], prompt_tokens: int | None = None) -> LightRow:
    prompt = len(ids) if prompt_tokens is None else prompt_tokens
    return LightRow(
        name, None, len(ids), prompt, 4, np.array(ids, np.int32), np.array(mask, np.uint8), (1, 2)
    )


def verdict(number: int) -> LogitVerdict:
    """One right row and one wrong one."""
    right = LogitReading(f"row {number}", -1.0, -1.0 - number, 0.1, True, None, 0.0)
    wrong = replace(right, fault="off")
    return LogitVerdict(2, 2, float(number), (f"row {number}: off",), (right, wrong))


def count(tally: JobTally | LayerTally, states_TH: torch.Tensor, layer_id: int = 1) -> None:
    low_T, high_T = torch.aminmax(states_TH, dim=1)
    if isinstance(tally, JobTally):
        tally.layer(layer_id, states_TH, low_T, high_T)
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_row_is_counted_once(dtype):
    tally, total = LayerTally(), 0
    for number in range(200):
        states_TH = torch.full((1 + number % 40, 4096), 1.0 + number % 3).to(dtype)
        states_TH[:, ::2] *= -1
        tally.add(states_TH, *torch.aminmax(states_TH, dim=1))
        total += min(len(states_TH), 4) + len(range(4, len(states_TH), -(-(len(states_TH) - 4) // 12) or 1))
    assert tally.tokens == total
    found = [tally.rms((share,))[0] for share in (0.2, 0.5, 0.9)]
    assert found == pytest.approx([1, 2, 3], rel=0.05)
    assert tally.max_abs == 3
