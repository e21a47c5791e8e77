"""The length from readings: a played loop is held against one written out, an estimate against its mean."""

import numpy as np
import pytest

from service.diagnose.acceptance import (
    RowPredictions,
    accepted,
    begin_of,
    bootstrap,
    by_group,
    drafts_of,
    length,
    step_rates,
)


def reading(right_KR, known_KR=None, *, begins=(0,), own=True, number=0):
    right_KR = np.array(right_KR, bool)
    places = right_KR.shape[1]
    begins_R = np.isin(np.arange(places), begins)
    known_KR = np.ones_like(right_KR) if known_KR is None else np.array(known_KR, bool)
    return RowPredictions(number, own, 0.5, np.arange(10, 10 + places), begins_R, right_KR, known_KR)


def test_a_played_row_jumps_over_what_was_accepted():
    """Draft at 0: two right. The server has three tokens more and drafts at 3: none right. Then at 4: one."""
    right = [[1, 0, 0, 0, 1], [1, 1, 1, 1, 0]]
    drafts = drafts_of([reading(right)], np.zeros(2))
    assert drafts.position_D.tolist() == [0, 3, 4]
    assert drafts.accepted_DK.tolist() == [[1, 1], [0, 0], [1, 0]]
    assert length(drafts).mean == 1 + 3 / 3
    assert drafts.accepted_DK.mean(axis=0).tolist() == [pytest.approx(2 / 3), pytest.approx(1 / 3)]


def test_a_long_play_is_that_of_a_server_written_out():
    draw = np.random.default_rng(5)
    right = draw.random((3, 400)) < 0.6
    at, counted = 0, []
    while at < 400:
        accepted = next((step for step in range(3) if not right[step, at]), 3)
        counted.append((at, accepted))
        at += accepted + 1
    drafts = drafts_of([reading(right)], np.zeros(3))
    assert list(zip(drafts.position_D.tolist(), drafts.accepted_DK.sum(axis=1), strict=True)) == counted


def test_each_answer_of_a_row_begins_anew():
    drafts = drafts_of([reading([[1, 1, 1, 1, 1]], begins=(0, 3))], np.zeros(1))
    assert drafts.position_D.tolist() == [0, 2, 0]


def test_what_lies_behind_the_end_counts_as_it_does_elsewhere():
    known = [[1, 1], [1, 0], [0, 0]]
    drafts = drafts_of([reading([[0, 1], [0, 0], [0, 0]], known)], np.array([0.9, 0.5, 0.2]))
    assert drafts.accepted_DK[1].tolist() == [1, 0.5, pytest.approx(0.1)]


def test_text_of_others_is_drafted_at_every_place():
    drafts = drafts_of([reading([[1, 1, 0, 1]], own=False)], np.zeros(1))
    assert drafts.position_D.tolist() == [0, 1, 2, 3]
    assert length(drafts).mean == 1.75


def test_a_rate_is_of_the_drafts_whose_drafts_before_are_right():
    assert step_rates([reading([[1, 1, 0], [1, 0, 1]])]).tolist() == [pytest.approx(2 / 3), 0.5]


def test_the_interval_holds_the_mean_and_narrows_with_rows():
    draw = np.random.default_rng(1)
    rows = [reading(draw.random((2, 40)) < 0.5, number=number) for number in range(200)]
    few, many = length(drafts_of(rows[:10], np.zeros(2))), length(drafts_of(rows, np.zeros(2)))
    assert few.low < few.mean < few.high
    assert many.high - many.low < few.high - few.low


def test_a_group_holds_the_drafts_of_its_name():
    drafts = drafts_of([reading([[1, 1, 0, 0]], own=False), reading([[0, 0]], number=3)], np.zeros(1))
    groups = by_group(drafts, begin_of(drafts.position_D, (0, 2)))
    assert {name: (group.mean, group.drafts) for name, group in groups.items()} == {
        "0": (1.5, 4),
        "2": (1.0, 2),
    }
    assert [group.mean for group in by_group(drafts, drafts.row_D).values()] == [1.5, 1.0]


def test_a_target_that_samples_accepts_the_product_of_its_chances():
    assert accepted(np.array([[0.5, 1.0], [0.5, 0.0]])).sum(axis=0).tolist() == [0.75, 1.0]


def test_a_difference_of_the_same_rows_has_an_interval_of_its_own():
    base, counts = np.arange(60) % 7, np.full(60, 10)
    gain, low, high = bootstrap((base + 1.0) - base, counts, 0.998)
    assert (gain, low, high) == (pytest.approx(0.1), pytest.approx(0.1), pytest.approx(0.1))
