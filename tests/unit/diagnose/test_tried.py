"""The effect of a change, from the tokens accepted over each row with and without it."""

import numpy as np
import pytest

from service.diagnose.setting import Change
from service.diagnose.tried import _compared

ROWS, PLACES = 64, 100


@pytest.mark.parametrize(
    ("gain", "effect"),
    [(0.05, "better"), (0.001, "no difference"), (-0.001, "no difference"), (-0.05, "worse")],
)
def test_a_change_that_alters_less_than_a_hundredth_is_no_difference_however_sure(gain: float, effect: str):
    counts_N = np.full(ROWS, PLACES)
    base_N3 = np.random.default_rng(0).uniform(0.9, 1.1, (ROWS, 3)) * PLACES
    tried = _compared(Change("other", ""), base_N3 * (1 + gain), base_N3, counts_N)
    assert tried.low * tried.high > 0, "it is sure that there is one"
    assert tried.effect == effect
