import pytest
import torch

from connector.gather import CpuGather


@pytest.mark.parametrize("physical", ["BLSH", "BSLH"])
@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 12])
def test_the_gather_puts_each_layers_tokens_in_order(num_tokens, physical):
    cache = torch.randn(9, 3, 4, 8)
    if physical == "BSLH":
        cache = cache.permute(0, 2, 1, 3).contiguous().permute(0, 2, 1, 3)
    blocks = [7, 0, 4][: -(-num_tokens // 4)]
    out = torch.full((3, num_tokens, 8), float("nan"))
    assert CpuGather(cache).start(blocks, out).done()
    for layer in range(3):
        for token in range(num_tokens):
            assert torch.equal(out[layer, token], cache[blocks[token // 4], layer, token % 4])
