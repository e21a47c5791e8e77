"""The gather on the CPU. What the CUDA gather copies is checked, byte by byte, by `benchmarks.gpu`."""

import numpy as np
import pytest
import torch

from connector.gather import CpuGather
from tests.support.sums import token_sums
from tests.unit.connector.caches import LAYOUTS, cache_BLSH


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 12])
def test_the_gather_puts_each_layers_tokens_in_order(num_tokens, layout):
    cache = cache_BLSH(layout)
    blocks = [7, 0, 4][: -(-num_tokens // 4)]
    out = torch.full((3, num_tokens, 8), float("nan"))
    (copy,) = CpuGather(cache).start([(blocks, out)])
    assert copy.done()
    for layer in range(3):
        for token in range(num_tokens):
            assert torch.equal(out[layer, token], cache[blocks[token // 4], layer, token % 4])
    assert np.array_equal(copy.sums(), token_sums(out))


def test_a_slab_between_others_is_all_that_is_written():
    slabs = torch.full((3, 3, 5, 8), float("nan"))
    CpuGather(cache_BLSH("layer first")).start([([1, 2], slabs[1])])
    assert slabs[1].isfinite().all()
    assert slabs[0].isnan().all() and slabs[2].isnan().all()
