"""The arithmetic of the CUDA gather. What it copies on a device is checked by `benchmarks.gpu_drain`."""

import pytest
import torch
from hypothesis import given, strategies as st

from connector.cuda_gather import Part, Ring, RowTable, cut_into_pieces
from connector.gather import CpuGather
from tests.unit.connector.caches import LAYOUTS, cache_BLSH

BLOCKS = (7, 0, 4)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 12])
def test_the_numbered_rows_are_the_requests_states_in_order(num_tokens, layout):
    cache = cache_BLSH(layout)
    blocks = BLOCKS[: -(-num_tokens // 4)]
    table = RowTable(cache)
    numbers = torch.from_numpy(table.numbers(blocks, num_tokens))
    wanted = torch.empty(3, num_tokens, 8)
    CpuGather(cache).start([(blocks, wanted)])
    assert torch.equal(table.rows_RH.index_select(0, numbers).view(3, num_tokens, 8), wanted)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_table_ends_with_the_caches_last_row(layout):
    cache = cache_BLSH(layout)
    table = RowTable(cache)
    assert table.numbers([8], 4).max() == len(table.rows_RH) - 1
    assert torch.equal(table.rows_RH[-1], cache[8, 2, 3])
    assert table.rows_RH.data_ptr() == cache.data_ptr()


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


def test_a_request_is_cut_only_where_a_piece_is_full():
    assert cut_into_pieces([3, 9, 2], 5) == [
        [Part(0, slice(0, 3), last=True), Part(1, slice(0, 2), last=False)],
        [Part(1, slice(2, 7), last=False)],
        [Part(1, slice(7, 9), last=True), Part(2, slice(0, 2), last=True)],
    ]


def test_no_request_makes_no_piece():
    assert cut_into_pieces([], 5) == []


@given(st.lists(st.integers(1, 40), max_size=12), st.integers(1, 20))
def test_every_row_is_in_one_piece_and_only_the_last_piece_is_not_full(num_rows, piece_rows):
    cut = cut_into_pieces(num_rows, piece_rows)
    everything = range(max(num_rows, default=0))
    rows = [(part.request, row) for piece in cut for part in piece for row in everything[part.rows]]
    assert rows == [(request, row) for request, count in enumerate(num_rows) for row in range(count)]
    sizes = [sum(part.rows.stop - part.rows.start for part in piece) for piece in cut]
    assert all(size == piece_rows for size in sizes[:-1])
    assert all(0 < size <= piece_rows for size in sizes)
    ended = [part.request for piece in cut for part in piece if part.last]
    assert ended == list(range(len(num_rows)))
