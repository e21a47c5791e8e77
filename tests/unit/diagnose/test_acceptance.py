"""The length from readings: a played loop is held against one written out, an estimate against its mean."""

import numpy as np
import pytest

from service.diagnose.acceptance import (
    Reading,
    by_position,
    by_step,
    difference,
    drafts_of,
    length,
    sampled_length,
    step_rates,
)


def reading(right_KR, known_KR=None, *, begins=(0,), own=True, number=0, chance_KR=None):
    right_KR = np.array(right_KR, bool)
    places = right_KR.shape[1]
    begins_R = np.isin(np.arange(places), begins)
    known_KR = np.ones_like(right_KR) if known_KR is None else np.array(known_KR, bool)
    chance_KR = np.zeros(right_KR.shape) if chance_KR is None else np.array(chance_KR)
    return Reading(
        number, np.arange(10, 10 + places), begins_R, right_KR, known_KR, chance_KR, chance_KR, own
    )


def test_a_played_row_jumps_over_what_was_accepted():
    """Draft at 0: two right. The server has three tokens more and drafts at 3: none right. Then at 4: one."""
    right = [[1, 0, 0, 0, 1], [1, 1, 1, 1, 0]]
    drafts = drafts_of(reading(right), np.zeros(2))
    assert drafts.positions_D.tolist() == [0, 3, 4]
    assert drafts.accepted_DK.tolist() == [[1, 1], [0, 0], [1, 0]]
    assert length([drafts]).mean == 1 + 3 / 3
    assert by_step([drafts]) == [pytest.approx(2 / 3), pytest.approx(1 / 3)]


def test_a_long_play_is_that_of_a_server_written_out():
    draw = np.random.default_rng(5)
    right = draw.random((3, 400)) < 0.6
    at, counted = 0, []
    while at < 400:
        accepted = next((step for step in range(3) if not right[step, at]), 3)
        counted.append((at, accepted))
        at += accepted + 1
    drafts = drafts_of(reading(right), np.zeros(3))
    assert list(zip(drafts.positions_D.tolist(), drafts.accepted_DK.sum(axis=1), strict=True)) == counted


def test_each_answer_of_a_row_begins_anew():
    drafts = drafts_of(reading([[1, 1, 1, 1, 1]], begins=(0, 3)), np.zeros(1))
    assert drafts.positions_D.tolist() == [0, 2, 0]


def test_what_lies_behind_the_end_counts_as_it_does_elsewhere():
    known = [[1, 1], [1, 0], [0, 0]]
    drafts = drafts_of(reading([[0, 1], [0, 0], [0, 0]], known), np.array([0.9, 0.5, 0.2]))
    assert drafts.accepted_DK[1].tolist() == [1, 0.5, pytest.approx(0.1)]


def test_text_of_others_is_drafted_at_every_place():
    drafts = drafts_of(reading([[1, 1, 0, 1]], own=False), np.zeros(1))
    assert drafts.positions_D.tolist() == [0, 1, 2, 3]
    assert length([drafts]).mean == 1.75


def test_a_rate_is_of_the_drafts_whose_drafts_before_are_right():
    assert step_rates([reading([[1, 1, 0], [1, 0, 1]])]).tolist() == [pytest.approx(2 / 3), 0.5]


def test_the_interval_holds_the_mean_and_narrows_with_rows():
    draw = np.random.default_rng(1)
    rows = [drafts_of(reading(draw.random((2, 40)) < 0.5, number=n), np.zeros(2)) for n in range(200)]
    few, many = length(rows[:10]), length(rows)
    assert few.low < few.mean < few.high
    assert many.high - many.low < few.high - few.low
    assert set(by_position(rows)) == {"0", "8", "16", "32"}


def test_a_target_that_samples_accepts_the_product_of_its_chances():
    chance = [[0.5, 1.0], [0.5, 0.0]]
    assert sampled_length([reading(np.zeros((2, 2)), chance_KR=chance)], "chance_KR") == 1 + (0.75 + 1.0) / 2


def test_a_difference_is_of_the_same_rows():
    base = [(float(n % 7), 10) for n in range(60)]
    better = [(value + 1, count) for value, count in base]
    gain, low, high = difference(better, base, 0.998)
    assert (gain, low, high) == (pytest.approx(0.1), pytest.approx(0.1), pytest.approx(0.1))
