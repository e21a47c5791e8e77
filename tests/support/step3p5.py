"""A tiny random Step-3.5 in the layout of its published checkpoint, which transformers cannot write.

Everything that its layers differ in is there: full and sliding attention with other numbers of heads, rotary
bases and shares, Llama-3 scaling on the full ones, head-wise gates, dense and mixture layers, clamped
activations, and a trailing layer for multi-token prediction that is no part of the target.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from examples.tiny_target import Recipe, make_tokenizer

NUM_LAYERS, HIDDEN_SIZE, VOCAB_SIZE, HEAD_DIM, EXPERTS, EXPERT_SIZE = 6, 128, 512, 32, 8, 96
FULL, SLIDING = "full_attention", "sliding_attention"
LAYER_TYPES = [FULL, SLIDING, SLIDING, FULL, SLIDING, SLIDING, FULL]
"""One more than there are layers: the last is the one for multi-token prediction."""
MIXTURES = (3, 4, 5)
HEADS = {FULL: 4, SLIDING: 6}
KV_HEADS = 2

CONFIG: dict[str, Any] = {
    "architectures": ["Step3p5ForCausalLM"],
    "model_type": "step3p5",
    "dtype": "float32",
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": 192,
    "num_hidden_layers": NUM_LAYERS,
    "vocab_size": VOCAB_SIZE,
    "max_seq_len": 1024,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "head_dim": HEAD_DIM,
    "num_attention_heads": HEADS[FULL],
    "num_attention_groups": KV_HEADS,
    "attention_other_setting": {
        "attention_type": SLIDING,
        "num_attention_heads": HEADS[SLIDING],
        "num_attention_groups": KV_HEADS,
        "head_dim": HEAD_DIM,
        "true_head_dim": HEAD_DIM,
    },
    "att_impl_type": "GQA",
    "use_qk_norm": True,
    "use_head_wise_attn_gate": True,
    "layer_types": LAYER_TYPES,
    "sliding_window": 64,
    "use_rope_layers": [],
    "rope_theta": [5e6 if kind == FULL else 1e4 for kind in LAYER_TYPES],
    "partial_rotary_factors": [0.5 if kind == FULL else 1.0 for kind in LAYER_TYPES],
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 2.0,
        "original_max_position_embeddings": 256,
        "low_freq_factor": 1.0,
        "high_freq_factor": 32.0,
    },
    "yarn_only_types": [FULL],
    "use_moe": True,
    "moe_layers_enum": ",".join(map(str, MIXTURES)),
    "moe_every_n_layer": 1,
    "moe_layer_offset": 0,
    "moe_num_experts": EXPERTS,
    "moe_top_k": 2,
    "moe_intermediate_size": EXPERT_SIZE,
    "share_expert_dim": EXPERT_SIZE,
    "norm_expert_weight": True,
    "moe_router_activation": "sigmoid",
    "moe_router_scaling_factor": 3.0,
    "use_moe_router_bias": True,
    "need_fp32_gate": True,
    # The routed experts' clamp has no kernel in the CPU build; the dense layers' and the shared expert's has.
    "swiglu_limits": [0.0] * len(LAYER_TYPES),
    "swiglu_limits_shared": [0.0, 0.0, 0.5, 0.0, 0.5, 0.0, 0.0],
    "num_nextn_predict_layers": 1,
    "bos_token_id": 0,
    "eos_token_id": [1],
    "pad_token_id": 2,
}

ON_CPU = {"worker_extension_cls": "tests.support.cpu_routing.SigmoidRouting"}
"""Engine option without which the CPU build cannot route as this model does."""


def step3p5_target(folder: Path) -> Path:
    """Write the model, with a small tokenizer, to `folder` and return it."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(_weights(torch.Generator().manual_seed(0)), folder / "model.safetensors")
    make_tokenizer(Recipe(vocab=VOCAB_SIZE)).save_pretrained(folder)
    return folder


def _weights(generator: torch.Generator) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}

    def draw(name: str, *shape: int, std: float = 0.1) -> None:
        tensors[f"{name}.weight" if "bias" not in name else name] = std * torch.randn(
            shape, generator=generator
        )

    def gated(name: str, size: int, *experts: int) -> None:
        for part in ("gate_proj", "up_proj"):
            draw(f"{name}.{part}", *experts, size, HIDDEN_SIZE)
        draw(f"{name}.down_proj", *experts, HIDDEN_SIZE, size)

    draw("model.embed_tokens", VOCAB_SIZE, HIDDEN_SIZE, std=1.0)
    draw("lm_head", VOCAB_SIZE, HIDDEN_SIZE)
    draw("model.norm", HIDDEN_SIZE, std=0.3)
    for number, kind in enumerate(LAYER_TYPES):
        layer, attention = f"model.layers.{number}", f"model.layers.{number}.self_attn"
        draw(f"{layer}.input_layernorm", HIDDEN_SIZE, std=0.3)
        draw(f"{layer}.post_attention_layernorm", HIDDEN_SIZE, std=0.3)
        draw(f"{attention}.q_proj", HEADS[kind] * HEAD_DIM, HIDDEN_SIZE)
        draw(f"{attention}.k_proj", KV_HEADS * HEAD_DIM, HIDDEN_SIZE)
        draw(f"{attention}.v_proj", KV_HEADS * HEAD_DIM, HIDDEN_SIZE)
        draw(f"{attention}.g_proj", HEADS[kind], HIDDEN_SIZE)
        draw(f"{attention}.o_proj", HIDDEN_SIZE, HEADS[kind] * HEAD_DIM)
        draw(f"{attention}.q_norm", HEAD_DIM, std=0.3)
        draw(f"{attention}.k_norm", HEAD_DIM, std=0.3)
        if number in MIXTURES:
            draw(f"{layer}.moe.gate", EXPERTS, HIDDEN_SIZE, std=0.3)
            draw(f"{layer}.moe.router_bias", EXPERTS, std=0.2)
            gated(f"{layer}.moe", EXPERT_SIZE, EXPERTS)
            gated(f"{layer}.share_expert", EXPERT_SIZE)
        else:
            gated(f"{layer}.mlp", 192)
    return tensors
