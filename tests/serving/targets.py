"""Tiny targets, and what their checkpoints hold for multi-token prediction."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.architectures.experts import ROUTED
from tests.architectures.recipe import HIDDEN_SIZE, NUM_LAYERS, VOCAB_SIZE, Recipe
from tests.architectures.target import make_target
from tests.support import step3p5
from tests.support.step3p5 import step3p5_target

MTP_LAYERS_OF_STEP = 3


def qwen2(folder: Path) -> Path:
    """Write a Qwen-2."""
    return make_target(folder, Recipe("Qwen2ForCausalLM", "qwen2"))


def mimo(folder: Path, body: Path) -> Path:
    """Write a MiMo: a Qwen-2's very weights under its name, and a layer for multi-token prediction."""
    shutil.copytree(body, folder)
    layer = "model.mtp_layers.0"
    drawn = {f"{layer}.{norm}.weight": _norm() for norm in ("token_layernorm", "hidden_layernorm")}
    drawn |= {f"{layer}.final_layernorm.weight": _norm(), f"{layer}.input_proj.weight": _projection()}
    about = {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    return _extend(folder, about, {layer: f"model.layers.{NUM_LAYERS - 1}"}, drawn)


def glm4_moe(folder: Path) -> Path:
    """Write a GLM-4 mixture with a layer for multi-token prediction of DeepSeek's form."""
    make_target(folder, Recipe("Glm4MoeForCausalLM", "glm4_moe", ROUTED | {"head_dim": 32}))
    layer = f"model.layers.{NUM_LAYERS}"
    return _extend(
        folder,
        {"num_nextn_predict_layers": 1},
        {layer: f"model.layers.{NUM_LAYERS - 1}"},
        _deepseek_part(layer, "shared_head.head"),
    )


def published_step35(folder: Path) -> Path:
    """Write a Step-3.5 whose three steps of multi-token prediction have a layer each, as published."""
    step3p5_target(folder)
    extra = MTP_LAYERS_OF_STEP - 1
    longer = {
        key: [*value, *[value[-1]] * extra]
        for key, value in step3p5.CONFIG.items()
        if isinstance(value, list) and len(value) == step3p5.NUM_LAYERS + 1
    }
    first, *others = (f"model.layers.{step3p5.NUM_LAYERS + n}" for n in range(MTP_LAYERS_OF_STEP))
    drawn: dict[str, torch.Tensor] = {}
    for layer in (first, *others):
        part = _deepseek_part(layer, "transformer.shared_head.output")
        # Its norms multiply by 1 + weight.
        drawn |= {name: value - 1 if value.ndim == 1 else value for name, value in part.items()}
    about = longer | {"num_nextn_predict_layers": MTP_LAYERS_OF_STEP}
    return _extend(folder, about, dict.fromkeys(others, first), drawn)


def step35(folder: Path) -> Path:
    """Write the same with full attention in every layer, so that its config need not name the layers' kinds.

    vLLM 0.32 cuts that list to the target's own layers and then looks for those of the prediction in it.
    """
    published_step35(folder)
    tensors = load_file(folder / "model.safetensors")
    heads = step3p5.HEADS[step3p5.FULL]
    for name, tensor in tensors.items():
        if name.endswith(("self_attn.q_proj.weight", "self_attn.g_proj.weight")):
            rows = heads * step3p5.HEAD_DIM if "q_proj" in name else heads
            tensors[name] = tensor[:rows].clone()
        elif name.endswith("self_attn.o_proj.weight"):
            tensors[name] = tensor[:, : heads * step3p5.HEAD_DIM].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return _extend(folder, {"layer_types": None, "yarn_only_types": []}, {}, {})


def _extend(
    folder: Path, about: Mapping[str, Any], copies: Mapping[str, str], drawn: dict[str, torch.Tensor]
) -> Path:
    """Change a model's config, and add tensors: copies of whole layers under new names, and drawn ones."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | about))
    tensors = load_file(folder / "model.safetensors")
    for new, old in copies.items():
        tensors |= {
            name.replace(f"{old}.", f"{new}."): tensor.clone()
            for name, tensor in tensors.items()
            if name.startswith(f"{old}.")
        }
    save_file(tensors | drawn, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _deepseek_part(layer: str, head: str) -> dict[str, torch.Tensor]:
    """Return what a prediction layer of DeepSeek's form has beside its decoder layer."""
    return {
        f"{layer}.enorm.weight": _norm(),
        f"{layer}.hnorm.weight": _norm(),
        f"{layer}.eh_proj.weight": _projection(),
        f"{layer}.{head.rsplit('.', 1)[0]}.norm.weight": _norm(),
        f"{layer}.{head}.weight": 0.08 * torch.randn(VOCAB_SIZE, HIDDEN_SIZE, generator=_drawn(3)),
    }


def _norm() -> torch.Tensor:
    return 1 + 0.3 * torch.randn(HIDDEN_SIZE, generator=_drawn(1))


def _projection() -> torch.Tensor:
    return 0.08 * torch.randn(HIDDEN_SIZE, 2 * HIDDEN_SIZE, generator=_drawn(2))


def _drawn(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
