import math
import pickle

import numpy as np
import pytest
import torch

from schemas.dataset.shard import LightRow
from service.proof.logit_check import LogitReading
from service.proof.report.layer_tally import LayerTally
from service.proof.report.tally import (
    HEAD_TOKENS,
    MAX_FAULTY_POINTS,
    MAX_POINTS,
    SAMPLES,
    SHARE_BINS,
    TAIL_TOKENS,
    Few,
    JobTally,
)


def light(name: str, ids: list[int], mask: list[int], prompt_tokens: int | None = None) -> LightRow:
    prompt = len(ids) if prompt_tokens is None else prompt_tokens
    return LightRow(
        name, None, len(ids), prompt, 4, np.array(ids, np.int32), np.array(mask, np.uint8), (1, 2)
    )


def reading(number: int, *, fault: bool = False) -> LogitReading:
    return LogitReading(f"row {number}", -1.0, -1.0 - number, 0.1, True, fault)


def count(tally: JobTally | LayerTally, states_TH: torch.Tensor, layer_id: int = 1) -> None:
    low_T, high_T = torch.aminmax(states_TH, dim=1)
    if isinstance(tally, JobTally):
        tally.layer(layer_id, states_TH, low_T, high_T)
    else:
        tally.add(states_TH, low_T, high_T)
    tally.settle()


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


def test_a_tally_grows_no_larger_with_more_data():
    tally = JobTally()
    sizes = []
    for number in range(3 * MAX_POINTS):
        tally.row(
            "data/a", number, light(f"s{number}", [1] * (10 + number % 7), [0, 1] * 5 + [1] * (number % 7))
        )
        tally.logits("data/a", [reading(number), reading(number, fault=True)])
        count(tally, torch.randn(17, 8))
        if number in (MAX_POINTS * 2, MAX_POINTS * 3 - 1):
            sizes.append(len(pickle.dumps(tally)))
    assert len(tally.points.items()) == MAX_POINTS
    assert len(tally.faulty_points.items()) == MAX_FAULTY_POINTS
    assert len(tally.samples.items()) == SAMPLES
    assert sizes[1] == pytest.approx(sizes[0], rel=0.01)


def test_parts_that_were_counted_apart_merge_into_the_whole():
    whole, first, second = JobTally(), JobTally(), JobTally()
    generator = torch.Generator().manual_seed(3)
    for number in range(40):
        states_TH = torch.randn(5 + number, 8, generator=generator)
        states_TH[number % 5] *= number % 2
        mask = [place % 3 == 0 and number > 3 for place in range(5 + number)]
        for tally in (whole, first if number < 25 else second):
            tally.row("data/a", number, light(f"s{number}", list(range(5 + number)), mask))
            tally.logits("data/a", [reading(number, fault=number % 9 == 0)])
            count(tally, states_TH, layer_id=number % 2)
    first.merge(pickle.loads(pickle.dumps(second)))
    assert first.lengths == whole.lengths
    assert (first.unsupervised_rows, whole.unsupervised_rows) == (4, 4)
    assert first.supervised_tokens == whole.supervised_tokens
    assert first.shares.tolist() == whole.shares.tolist()
    assert first.samples.items() == whole.samples.items()
    assert first.points.items() == whole.points.items()
    assert first.faulty_points.items() == whole.faulty_points.items()
    for layer_id in (0, 1):
        assert (first.layers[layer_id].counts_PB == whole.layers[layer_id].counts_PB).all()
        assert first.layers[layer_id].faults(1) == whole.layers[layer_id].faults(1)
        assert first.layers[layer_id].max_abs == whole.layers[layer_id].max_abs


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


def test_a_long_sample_is_kept_by_its_two_ends():
    tally = JobTally()
    tally.row("data/a", 0, light("a", list(range(5000)), [0] * 4990 + [1] * 10))
    (sample,) = tally.samples.items()
    head, tail = sample.parts
    assert (head.start, head.ids) == (0, tuple(range(HEAD_TOKENS)))
    assert (tail.start, tail.ids) == (5000 - TAIL_TOKENS, tuple(range(5000 - TAIL_TOKENS, 5000)))
    assert sum(tail.supervised) == sample.supervised_tokens == 10


def test_a_sample_that_can_be_shown_is_kept_whole():
    tally = JobTally()
    length = HEAD_TOKENS + TAIL_TOKENS
    tally.row("data/a", 0, light("a", list(range(length)), [2] * length))
    (sample,) = tally.samples.items()
    assert [part.ids for part in sample.parts] == [tuple(range(length))]
    assert set(sample.parts[0].supervised) == {True}


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
def test_many_rows_wait_and_are_counted_once(dtype):
    tally, total = LayerTally(), 0
    for number in range(200):
        states_TH = torch.full((1 + number % 40, 4096), 1.0 + number % 3).to(dtype)
        states_TH[:, ::2] *= -1
        tally.add(states_TH, *torch.aminmax(states_TH, dim=1))
        total += min(len(states_TH), 4) + len(range(4, len(states_TH), -(-(len(states_TH) - 4) // 12) or 1))
    tally.settle()
    tally.settle()
    assert tally.tokens == total
    found = [tally.rms((share,))[0] for share in (0.2, 0.5, 0.9)]
    assert found == pytest.approx([1, 2, 3], rel=0.05)
    assert tally.max_abs == 3


def test_waiting_rows_hold_no_more_than_a_buffer():
    tally = LayerTally()
    for _ in range(300):
        states_TH = torch.ones(50, 4096)
        tally.add(states_TH, *torch.aminmax(states_TH, dim=1))
        assert len(pickle.dumps(tally._waiting)) < 2**21
