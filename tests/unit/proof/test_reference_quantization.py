"""A quantized target's reference has the bits of a plain model whose weights are the dequantized ones."""

from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme
from safetensors.torch import load_file, save_file

from service.errors import EngineRefused
from service.proof.canary import canary_prompts
from service.proof.reference_model import build_skeleton
from tests.architectures.recipes import RECIPES
from tests.architectures.target import make_model
from tests.support.reference_models import TinyModel, edit_config
from tests.support.whole_model import assert_same_bits, streamed_states, whole_states

PROMPTS = canary_prompts(512, 40)[-1:]
FP8 = torch.float8_e4m3fn
INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
TOKEN8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}


def save_model(folder: Path, name: str) -> None:
    if name in RECIPES:
        make_model(RECIPES[name]).to(torch.bfloat16).save_pretrained(folder)
    else:
        TinyModel(folder, name, "bfloat16")


def store(folder: Path, tensors: dict[str, torch.Tensor], quantization: dict[str, Any] | None) -> None:
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    if quantization is not None:
        edit_config(folder, quantization_config=quantization)


def is_quantized(name: str, tensor: torch.Tensor) -> bool:
    return ".layers." in name and "proj" in name and tensor.ndim == 2


@pytest.mark.parametrize("name", ["llama", "MixtralForCausalLM"])
def test_block_fp8_weights_are_the_stored_values_times_their_scales(tmp_path, name):
    save_model(tmp_path, name)
    plain, stored = load_file(tmp_path / "model.safetensors"), {}
    for key, tensor in list(plain.items()):
        stored[key] = tensor
        if (is_quantized(key, tensor) or ".experts." in key) and "gate.weight" not in key:
            rows, columns = tensor.shape
            blocks = tensor.float().reshape(rows // 32, 32, columns // 32, 32)
            scale = blocks.abs().amax(dim=(1, 3), keepdim=True) / 448
            small = (blocks / scale).to(FP8)
            stored[key] = small.reshape(rows, columns)
            stored[f"{key}_scale_inv"] = scale.reshape(rows // 32, columns // 32)
            plain[key] = (small.float() * scale).reshape(rows, columns).to(torch.bfloat16)
    assert len(stored) > len(plain)
    store(tmp_path, plain, None)
    want = whole_states(tmp_path, PROMPTS, torch.bfloat16)
    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32]}
    store(tmp_path, stored, config)
    assert_same_bits(streamed_states(tmp_path, PROMPTS, torch.bfloat16), want)
    quantization = build_skeleton(tmp_path, torch.bfloat16).quantization
    assert quantization is not None
    assert quantization.activation_bits == 8


def test_mxfp4_experts_are_sixteen_values_times_powers_of_two(tmp_path):
    save_model(tmp_path, "GptOssForCausalLM")
    plain = load_file(tmp_path / "model.safetensors")
    stored = dict(plain)
    draw = torch.Generator().manual_seed(1)
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = torch.cat([values, -values])
    for key in [key for key in plain if key.endswith(("gate_up_proj", "down_proj"))]:
        experts, inner, outer = stored.pop(key).shape
        blocks = torch.randint(0, 256, (experts, outer, inner // 32, 16), generator=draw, dtype=torch.uint8)
        scales = torch.randint(120, 124, (experts, outer, inner // 32), generator=draw, dtype=torch.uint8)
        stored |= {f"{key}_blocks": blocks, f"{key}_scales": scales}
        pairs = torch.stack([values[(blocks & 15).long()], values[(blocks >> 4).long()]], dim=-1)
        weight = pairs.flatten(3) * 2.0 ** (scales.float() - 127)[..., None]
        plain[key] = weight.reshape(experts, outer, inner).transpose(1, 2).contiguous().to(torch.bfloat16)
    store(tmp_path, plain, None)
    want = whole_states(tmp_path, PROMPTS, torch.bfloat16)
    store(tmp_path, stored, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    assert_same_bits(streamed_states(tmp_path, PROMPTS, torch.bfloat16), want)
    quantization = build_skeleton(tmp_path, torch.bfloat16).quantization
    assert quantization is not None
    assert quantization.activation_bits is None


@pytest.mark.parametrize("name", ["llama", "MixtralForCausalLM"])
@pytest.mark.parametrize(
    ("form", "weights", "inputs"),
    [("pack-quantized", INT4, None), ("float-quantized", FLOAT8, TOKEN8)],
)
def test_compressed_tensors_are_decompressed(tmp_path, name, form, weights, inputs):
    save_model(tmp_path, name)
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    scheme = QuantizationScheme.model_validate(group)
    compressor = BaseCompressor.get_value_from_registry(form)
    plain, stored = load_file(tmp_path / "model.safetensors"), {}
    for key, tensor in list(plain.items()):
        if not (is_quantized(key, tensor) or ".experts." in key):
            stored[key] = tensor
            continue
        rows, columns = tensor.shape
        size = weights.get("group_size", columns)
        top = 448 if form == "float-quantized" else 7
        scale = tensor.reshape(rows, columns // size, size).abs().amax(dim=2) / top
        parts = compressor.compress({"weight": tensor, "weight_scale": scale}, scheme)
        stored |= {f"{key.removesuffix('weight')}{part}": value for part, value in parts.items()}
        plain[key] = compressor.decompress(parts, scheme)["weight"].to(torch.bfloat16)
        assert not torch.equal(plain[key], tensor)
    store(tmp_path, plain, None)
    want = whole_states(tmp_path, PROMPTS, torch.bfloat16)
    config = {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}
    store(tmp_path, stored, config | {"ignore": ["lm_head"], "quantization_status": "compressed"})
    assert_same_bits(streamed_states(tmp_path, PROMPTS, torch.bfloat16), want)
    quantization = build_skeleton(tmp_path, torch.bfloat16).quantization
    assert quantization is not None
    assert quantization.activation_bits == (8 if inputs else None)


def compressed(form: str, *groups: dict[str, Any]) -> dict[str, Any]:
    named = {f"group_{n}": {"targets": ["Linear"]} | group for n, group in enumerate(groups)}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": named}


FLOAT4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}


@pytest.mark.parametrize(
    ("quantization", "why"),
    [
        ({"quant_method": "gptq", "bits": 4}, "'gptq' cannot be read on the CPU"),
        ({"quant_method": "awq", "bits": 4}, "'awq' cannot be read on the CPU"),
        (
            compressed("pack-quantized", {"weights": INT4}, {"targets": ["Embedding"], "weights": FLOAT8}),
            "2 quantization schemes",
        ),
        (
            compressed(
                "nvfp4-pack-quantized",
                {"weights": FLOAT4, "input_activations": FLOAT4 | {"dynamic": "local"}},
            ),
            "products of 4-bit inputs",
        ),
    ],
)
def test_what_the_cpu_cannot_read_is_refused_with_the_way_around(tmp_path, quantization, why):
    TinyModel(tmp_path, "llama", "bfloat16")
    edit_config(tmp_path, quantization_config=quantization)
    with pytest.raises(EngineRefused, match=why) as refused:
        build_skeleton(tmp_path, torch.bfloat16)
    assert refused.value.field == "canary"
    assert '"skip"' in (refused.value.cure or "")
