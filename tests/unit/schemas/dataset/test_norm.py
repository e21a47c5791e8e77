"""The reader's final norm against the modules that the models themselves use."""

import json
from pathlib import Path

import pytest
import torch
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from schemas.dataset.errors import DatasetError
from schemas.dataset.files import LocalFile
from schemas.dataset.norm import MAX_BYTES, NormWeights, norm_bytes, read_norm_file
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


NORM = FinalNorm(kind="layernorm", eps=EPS)


def read(path: Path, content: bytes) -> NormWeights:
    path.write_bytes(content)
    return read_norm_file(LocalFile(path), NORM, HIDDEN)


def test_a_file_gives_back_the_norm(tmp_path: Path) -> None:
    weights = NormWeights(NORM, torch.randn(HIDDEN).bfloat16(), torch.randn(HIDDEN).bfloat16())
    back = read(tmp_path / "n", norm_bytes(weights))
    assert back.norm == NORM
    assert torch.equal(back.weight_H, weights.weight_H)
    assert back.bias_H is not None and torch.equal(back.bias_H, weights.bias_H)


def header(dtype: str, shape: list[int], offsets: list[int], num_bytes: int) -> bytes:
    text = json.dumps({"weight": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}).encode()
    return len(text).to_bytes(8, "little") + text + bytes(num_bytes)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (header("F32", [2**40], [0, 2**42], 8), "not a safetensors file"),
        (header("F32", [HIDDEN], [0, -(2**60)], 8), "not a safetensors file"),
        ((2**62).to_bytes(8, "little") + b"{}", "not a safetensors file"),
        (b"", "not a safetensors file"),
        (header("F32", [2], [0, 8], 8), r"expected a weight of \[64\]"),
        (header("I32", [HIDDEN], [0, 4 * HIDDEN], 4 * HIDDEN), "expected floating-point numbers"),
        (bytes(MAX_BYTES + 1), "at most 16777216"),
    ],
    ids=[
        "more than the file",
        "backwards",
        "a long header",
        "empty",
        "another shape",
        "whole numbers",
        "too large",
    ],
)
def test_a_file_that_is_no_norm_of_this_size_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(DatasetError, match=rf"^final_norm\.safetensors .*{message}"):
        read(tmp_path / "n", content)
