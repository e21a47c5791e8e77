"""What the CUDA gather does with these numbers on a device is checked by `benchmarks.gpu_drain`."""

import pytest
import torch

from connector.gather import CpuGather
from connector.rowtable import RowTable
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
