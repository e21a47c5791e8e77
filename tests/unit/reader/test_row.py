"""A row norms its last layer a few tokens at a time, to the same bits."""

import pytest
import torch

from schemas.dataset.norm import NormWeights
from schemas.identity import FinalNorm
from service.reader.row import Row

HIDDEN = 256


def row(states_TH: torch.Tensor, norm: NormWeights) -> Row:
    return Row(
        sample_id="s",
        source_id=None,
        prompt_tokens=1,
        input_ids=torch.zeros(len(states_TH), dtype=torch.int64),
        loss_mask=torch.ones(len(states_TH), dtype=torch.uint8),
        layer_ids=(4,),
        num_layers=4,
        read=lambda _layer_id: states_TH.clone(),
        norm=norm,
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kind", ["rmsnorm", "gemma_rmsnorm", "layernorm"])
@pytest.mark.parametrize("num_tokens", [1, 31, 32, 33, 100])
def test_the_norm_of_parts_is_the_norm_of_the_whole(num_tokens, kind, dtype):
    draw = torch.Generator().manual_seed(num_tokens)
    weight_H, bias_H = torch.randn((2, HIDDEN), generator=draw).to(dtype)
    norm = NormWeights(FinalNorm(kind=kind, eps=1e-6), weight_H, bias_H if kind == "layernorm" else None)
    states_TH = (torch.randn((num_tokens, HIDDEN), generator=draw) * 30).to(dtype)
    due, before = norm(states_TH), states_TH.clone()
    one = row(states_TH, norm)
    assert torch.equal(one.last_normed(), due)
    assert torch.equal(one.normed(states_TH), due)
    assert torch.equal(states_TH, before)
    assert one.normed(states_TH).dtype is dtype
