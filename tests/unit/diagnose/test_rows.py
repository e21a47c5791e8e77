"""Which rows of a dataset a diagnosis is of."""

import pytest

from service.diagnose.rows import spread


@pytest.mark.parametrize(("length", "most"), [(399, 200), (400, 200), (79, 40), (1001, 7), (5, 200), (1, 1)])
def test_the_rows_are_spread_over_the_whole_dataset(length, most):
    """Jobs and sources follow each other: its first half may be of one kind."""
    numbers = spread(length, most)
    gaps = [after - before for before, after in zip(numbers, [*numbers[1:], length], strict=True)]
    assert len(numbers) == min(length, most)
    assert numbers[0] == 0
    assert max(gaps) - min(gaps) <= 1


def test_of_nothing_there_is_nothing():
    assert spread(0, 40) == []
