"""Recipes of decoders that mix attention with recurrent layers, or have no attention."""

from tests.architectures.experts import EXPERTS, LOCAL
from tests.architectures.recipe import NUM_LAYERS, Recipe

LINEAR = {
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_conv_kernel_dim": 4,
}
EVERY_FOURTH = ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * (
    NUM_LAYERS // 4
)
MAMBA = {"mamba_d_state": 16, "mamba_n_heads": 8, "mamba_d_head": 32, "mamba_n_groups": 1, "mamba_d_ssm": 256}

NO_PREFIX_CACHE = {"enable_prefix_caching": False}
"""Copies of recurrent states for a prefix cache need a Triton kernel."""

TORCHVISION = "needs torchvision; measured with its Python side alone, its operators only declared"
AMX = "measured on a CPU with AMX; the text model passed on one without"

HYBRIDS = (
    Recipe(
        "Qwen3NextForCausalLM",
        "qwen3_next",
        EXPERTS | LINEAR | {"shared_expert_intermediate_size": 64, "layer_types": EVERY_FOURTH},
        dtype="bfloat16",
        options=NO_PREFIX_CACHE,
    ),
    Recipe(
        "Qwen3_5ForCausalLM",
        "qwen3_5_text",
        LINEAR | {"layer_types": EVERY_FOURTH},
        dtype="bfloat16",
        options=NO_PREFIX_CACHE,
        note=f"{TORCHVISION}; {AMX}",
    ),
    Recipe(
        "Qwen3_5MoeForCausalLM",
        "qwen3_5_moe_text",
        EXPERTS | LINEAR | {"shared_expert_intermediate_size": 64, "layer_types": EVERY_FOURTH},
        dtype="bfloat16",
        options=NO_PREFIX_CACHE,
        note=f"{TORCHVISION}; {AMX}",
    ),
    Recipe(
        "OlmoHybridForCausalLM",
        "olmo_hybrid",
        LINEAR | {"layer_types": EVERY_FOURTH},
        dtype="bfloat16",
        options=NO_PREFIX_CACHE,
    ),
    Recipe(
        "NemotronHForCausalLM",
        "nemotron_h",
        {
            "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"] * (NUM_LAYERS // 4),
            "ssm_state_size": 16,
            "time_step_limit": [0.0, 100.0],
            "mamba_num_heads": 8,
            "mamba_head_dim": 32,
            "n_groups": 1,
            "n_routed_experts": 4,
            "moe_intermediate_size": 64,
            "moe_shared_expert_intermediate_size": 64,
        },
    ),
    Recipe("FalconH1ForCausalLM", "falcon_h1", MAMBA),
    Recipe("FalconMambaForCausalLM", "falcon_mamba", {"state_size": 16}),
    Recipe("MambaForCausalLM", "mamba", {"state_size": 16}),
    Recipe("Mamba2ForCausalLM", "mamba2", {"state_size": 16, "num_heads": 8, "head_dim": 32, "n_groups": 1}),
    Recipe(
        "GraniteMoeHybridForCausalLM",
        "granitemoehybrid",
        LOCAL
        | {"shared_intermediate_size": 64, "layer_types": ["mamba", "attention"] * (NUM_LAYERS // 2)}
        | {key: value for key, value in MAMBA.items() if key != "mamba_d_ssm"},
    ),
    Recipe("JambaForCausalLM", "jamba", {"num_experts": 4, "mamba_d_state": 16, "mamba_dt_rank": 8}),
    Recipe(
        "KimiLinearForCausalLM",
        "kimi_linear",
        {
            "num_experts": 4,
            "num_key_value_heads": 4,
            "num_experts_per_token": 2,
            "moe_intermediate_size": 64,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 64,
            "v_head_dim": 32,
            "linear_head_dim": 128,
            "linear_num_heads": 4,
            "layer_types": EVERY_FOURTH,
        },
        dtype="bfloat16",
        options=NO_PREFIX_CACHE,
    ),
    Recipe("Lfm2ForCausalLM", "lfm2", {"layer_types": ["conv", "full_attention"] * (NUM_LAYERS // 2)}),
    Recipe(
        "Lfm2MoeForCausalLM",
        "lfm2_moe",
        EXPERTS | {"num_dense_layers": 1, "layer_types": ["conv", "full_attention"] * (NUM_LAYERS // 2)},
    ),
    Recipe(
        "Zamba2ForCausalLM",
        "zamba2",
        {
            "mamba_d_state": 16,
            "n_mamba_heads": 8,
            "mamba_headdim": 32,
            "mamba_ngroups": 1,
            "layers_block_type": ["mamba", "hybrid"] * (NUM_LAYERS // 2),
            "num_mem_blocks": 1,
        },
    ),
)
