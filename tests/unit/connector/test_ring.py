import pytest
from hypothesis import given, strategies as st

from connector.ring import Ring


def test_a_piece_lies_behind_the_one_before_until_the_end_is_too_near():
    ring: Ring[str] = Ring(10)
    places = []
    for name in "abcd":
        places.append(ring.take(4))
        ring.hold(name)
    assert places == [(0, None), (4, None), (0, "a"), (4, "b")]


def test_two_pieces_over_one_holder_both_wait_for_it():
    ring: Ring[str] = Ring(10)
    for name in "ab":
        ring.take(5)
        ring.hold(name)
    places = []
    for name in "cd":
        places.append(ring.take(2))
        ring.hold(name)
    assert places == [(0, "a"), (2, "a")]


def test_a_piece_over_several_others_waits_for_the_last_of_them():
    ring: Ring[str] = Ring(9)
    for name in "abc":
        ring.take(3)
        ring.hold(name)
    assert ring.take(5) == (0, "b")


@pytest.mark.parametrize("count", [0, 11])
def test_a_piece_that_fits_no_ring_is_an_error(count):
    with pytest.raises(ValueError, match="do not fit a ring of 10"):
        Ring(10).take(count)


@given(st.lists(st.integers(1, 12), max_size=80))
def test_no_place_is_given_again_before_its_holder_was_named(counts):
    ring: Ring[int] = Ring(12)
    owner: dict[int, int] = {}
    for holder, count in enumerate(counts):
        begin, last = ring.take(count)
        places = range(begin, begin + count)
        assert places[-1] < 12
        assert all(owner.get(place, -1) <= (-1 if last is None else last) for place in places)
        owner |= dict.fromkeys(places, holder)
        ring.hold(holder)
