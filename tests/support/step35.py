"""A tiny Step 3.5: its published config's keys and its checkpoint's tensor names, with random weights."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import Step3p7ForConditionalGeneration

from service.proof.reference_model import read_config

WINDOWED, FULL = "sliding_attention", "full_attention"

CONFIG: dict[str, Any] = {
    "architectures": ["Step3p5ForCausalLM"],
    "model_type": "step3p5",
    "att_impl_type": "GQA",
    "attention_other_setting": {
        "attention_type": WINDOWED,
        "num_attention_heads": 6,
        "num_attention_groups": 2,
        "head_dim": 32,
    },
    "bos_token_id": 0,
    "eos_token_id": [1, 2],
    "head_dim": 32,
    "hidden_size": 128,
    "intermediate_size": 256,
    # One entry more than decoder layers in each list: the published lists count the layers of the MTP too.
    "layer_types": [FULL, WINDOWED, WINDOWED, WINDOWED, FULL, WINDOWED, WINDOWED, WINDOWED, FULL],
    "max_position_embeddings": 512,
    "max_seq_len": 512,
    "moe_intermediate_size": 64,
    "moe_layers_enum": "3,4,5,6,7",
    "moe_num_experts": 8,
    "moe_router_activation": "sigmoid",
    "moe_router_scaling_factor": 3.0,
    "moe_top_k": 2,
    "need_fp32_gate": True,
    "norm_expert_weight": True,
    "num_attention_groups": 2,
    "num_attention_heads": 4,
    "num_hidden_layers": 8,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factors": [0.5, 1.0, 1.0, 1.0, 0.5, 1.0, 1.0, 1.0, 0.5],
    "rms_norm_eps": 1e-5,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 2.0,
        "original_max_position_embeddings": 256,
        "low_freq_factor": 1.0,
        "high_freq_factor": 32.0,
    },
    "rope_theta": [5e6, 1e4, 1e4, 1e4, 5e6, 1e4, 1e4, 1e4, 5e6],
    "share_expert_dim": 64,
    "sliding_window": 16,
    "swiglu_limits": [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 7.0, 7.0, 0.0],
    "swiglu_limits_shared": [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 16.0, 16.0, 0.0],
    "tie_word_embeddings": False,
    "use_head_wise_attn_gate": True,
    "use_moe": True,
    "use_moe_router_bias": True,
    "vocab_size": 512,
    "yarn_only_types": [FULL],
}
_TEXT = ("model.embed_tokens.", "model.layers.", "model.norm.", "lm_head.")


def save_step35(folder: Path, dtype: torch.dtype) -> None:
    """Write the model: config.json and safetensors."""
    told = CONFIG | {"torch_dtype": str(dtype).removeprefix("torch.")}
    (folder / "config.json").write_text(json.dumps(told))
    config: Any = read_config(folder)
    config.vision_config.num_hidden_layers = 1
    torch.manual_seed(0)
    model = Step3p7ForConditionalGeneration(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.model.language_model.state_dict().items():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_((0.1 if weight.ndim > 1 or "bias" in name else 0.3) * noise)
    model.to(dtype).save_pretrained(folder / "whole")
    tensors = load_file(folder / "whole" / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if name.startswith(_TEXT)}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
