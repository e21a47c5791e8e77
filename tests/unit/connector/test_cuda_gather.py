"""The arithmetic of the CUDA gather. Its copies on a device are checked by `benchmarks.gpu`."""

import pytest
import torch
from hypothesis import given, strategies as st

from connector.cuda_gather import RowTable, cut_into_pieces
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


@given(st.lists(st.integers(1, 40), max_size=12), st.integers(1, 20))
def test_every_row_is_in_one_piece_and_only_the_last_piece_is_not_full(num_rows, piece_rows):
    cut = cut_into_pieces(num_rows, piece_rows)
    everything = range(max(num_rows, default=0))
    rows = [(request, row) for piece in cut for request, part in piece for row in everything[part]]
    assert rows == [(request, row) for request, count in enumerate(num_rows) for row in range(count)]
    sizes = [sum(part.stop - part.start for _, part in piece) for piece in cut]
    assert all(size == piece_rows for size in sizes[:-1])
    assert all(0 < size <= piece_rows for size in sizes)
