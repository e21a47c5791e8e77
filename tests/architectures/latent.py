"""Recipes of decoders with multi-head latent attention."""

from typing import Any

from tests.architectures.experts import DENSE_FIRST, ROUTED
from tests.architectures.recipe import MAX_POSITION, NUM_LAYERS, Recipe

LATENT: dict[str, Any] = {
    # The one size that the kernel of the CPU build takes: 512 + 64, that of the published models.
    "q_lora_rank": 64,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
INDEXED = {"index_topk": 64, "index_head_dim": 32, "index_n_heads": 4}
BIASED = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
"""What published configs say and the config class takes for granted."""
V2 = ROUTED | LATENT | {"topk_method": "greedy"}

ON_CPU = {"max_num_batched_tokens": MAX_POSITION, "attention_backend": "CPU_MLA"}
"""Prefill is not chunked with this attention on a CPU; the other backend, for AMX, takes no float32."""
COMPILED = {"enforce_eager": False, **ON_CPU}
"""Eager rotary embeddings of the CPU build turn a query's first head alone, with or without extraction."""

LATENTS = (
    Recipe("DeepseekV2ForCausalLM", "deepseek_v2", V2, first_layer=1, options=COMPILED),
    Recipe("DeepseekV3ForCausalLM", "deepseek_v3", ROUTED | LATENT | BIASED, first_layer=1, options=COMPILED),
    Recipe(
        "DeepseekV32ForCausalLM",
        "deepseek_v32",
        ROUTED | LATENT | INDEXED | BIASED,
        first_layer=1,
        options=COMPILED,
    ),
    Recipe(
        "GlmMoeDsaForCausalLM",
        "glm_moe_dsa",
        ROUTED | LATENT | INDEXED | BIASED,
        first_layer=1,
        options=COMPILED,
    ),
    Recipe("Glm4MoeLiteForCausalLM", "glm4_moe_lite", ROUTED | LATENT, options=COMPILED),
    Recipe("MiniCPM3ForCausalLM", "minicpm3", LATENT | {"scale_emb": 12, "dim_model_base": 64}),
    Recipe(
        "LongcatFlashForCausalLM",
        "longcat_flash",
        LATENT
        | {
            "num_layers": NUM_LAYERS // 2,
            "ffn_hidden_size": 256,
            "expert_ffn_hidden_size": 64,
            "n_routed_experts": 4,
            "zero_expert_num": 2,
            "moe_topk": 2,
        },
        # Each decoder layer holds two attentions.
        num_layers=NUM_LAYERS // 2,
        options=COMPILED,
    ),
    Recipe(
        "DeepseekV4ForCausalLM",
        "deepseek_v4",
        {
            "head_dim": 32,
            "q_lora_rank": 64,
            "o_lora_rank": 32,
            "o_groups": 2,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "index_topk": 64,
            "index_head_dim": 32,
            "index_n_heads": 4,
        },
        first_layer=1,
    ),
    Recipe("AXK1ForCausalLM", "axk1", ROUTED | LATENT | {"mlp_layer_types": DENSE_FIRST}, options=COMPILED),
)
