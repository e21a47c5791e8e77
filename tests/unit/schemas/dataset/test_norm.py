"""The reader's final norm against the modules that the models themselves use."""

import pytest
import torch
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from schemas.dataset.norm import NormWeights
from schemas.identity import FinalNorm

HIDDEN, EPS = 64, 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["rmsnorm", "gemma_rmsnorm", "layernorm"])
def test_it_is_bit_for_bit_the_models_own(kind, dtype) -> None:
    draw = torch.Generator().manual_seed(3)
    module = {
        "rmsnorm": lambda: LlamaRMSNorm(HIDDEN, EPS),
        "gemma_rmsnorm": lambda: Gemma3RMSNorm(HIDDEN, EPS),
        "layernorm": lambda: torch.nn.LayerNorm(HIDDEN, EPS),
    }[kind]().to(dtype)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(HIDDEN, generator=draw))
    states = (torch.randn((50, HIDDEN), generator=draw) * 7).to(dtype)
    norm = NormWeights(FinalNorm(kind=kind, eps=EPS), module.weight.detach(), getattr(module, "bias", None))
    with torch.no_grad():
        due, got = module(states), norm(states)
    assert got.dtype is dtype
    if kind == "layernorm":
        assert torch.allclose(got.float(), due.float(), rtol=2e-2 if dtype is torch.bfloat16 else 2e-3)
    else:
        assert torch.equal(got, due)
