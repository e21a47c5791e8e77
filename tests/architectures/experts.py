"""Recipes of mixtures of experts with ordinary attention."""

from tests.architectures.dense import SLIDING
from tests.architectures.recipe import HIDDEN_SIZE, NUM_LAYERS, WINDOW, Recipe

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
DENSE_FIRST = ["dense"] + ["sparse"] * (NUM_LAYERS - 1)

MIMO_V2 = {
    # What the published config says of the same layers in keys of its own, which the engine reads.
    "hybrid_layer_pattern": [int(kind == SLIDING[0]) for kind in SLIDING],
    "moe_layer_freq": [int(kind == "sparse") for kind in DENSE_FIRST],
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,
    "swa_head_dim": 32,
    "swa_v_head_dim": 32,
    "sliding_window_size": WINDOW,
    "layernorm_epsilon": 1e-5,
    "partial_rotary_factor": 0.5,
    "rope_theta": 5e6,
    "swa_rope_theta": 1e4,
    "add_swa_attention_sink_bias": True,
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    },
}
SIGMOID_ROUTING = {"worker_extension_cls": "tests.support.cpu_routing.SigmoidRouting"}
SIGMOID_NOTE = "the CPU build's router helped to sigmoid scores, which a GPU's has"

MIXTURES = (
    Recipe("Qwen3MoeForCausalLM", "qwen3_moe", EXPERTS),
    Recipe("Qwen2MoeForCausalLM", "qwen2_moe", EXPERTS | {"shared_expert_intermediate_size": 64}),
    Recipe("MixtralForCausalLM", "mixtral", LOCAL),
    Recipe("OlmoeForCausalLM", "olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    Recipe("FlexOlmoForCausalLM", "flex_olmo", {"num_experts": 4, "num_experts_per_tok": 2}),
    Recipe("GptOssForCausalLM", "gpt_oss", LOCAL | {"sliding_window": WINDOW, "layer_types": SLIDING}),
    Recipe("Glm4MoeForCausalLM", "glm4_moe", ROUTED | {"head_dim": 32}),
    Recipe("GraniteMoeForCausalLM", "granitemoe", LOCAL | {"attention_multiplier": 0.17}),
    Recipe(
        "GraniteMoeSharedForCausalLM",
        "granitemoeshared",
        LOCAL | {"attention_multiplier": 0.17, "shared_intermediate_size": 64},
    ),
    Recipe(
        "GraniteMoeSWAForCausalLM",
        "granitemoe_swa",
        LOCAL | {"attention_multiplier": 0.17, "sliding_window": WINDOW, "layer_types": SLIDING},
    ),
    Recipe(
        "AfmoeForCausalLM",
        "afmoe",
        EXPERTS
        | {
            "num_dense_layers": 1,
            "num_shared_experts": 1,
            "sliding_window": WINDOW,
            "global_attn_every_n_layers": 2,
            "layer_types": SLIDING,
            "mup_enabled": True,
            "score_func": "sigmoid",
            "route_norm": True,
        },
        options=SIGMOID_ROUTING,
        note=SIGMOID_NOTE,
    ),
    Recipe(
        "Cohere2MoeForCausalLM",
        "cohere2_moe",
        EXPERTS | {"sliding_window": WINDOW, "layer_types": SLIDING, "num_shared_experts": 1},
    ),
    Recipe(
        "DbrxForCausalLM",
        "dbrx",
        {
            "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0},
            "ffn_config": {"hidden_size": HIDDEN_SIZE, "ffn_hidden_size": 64, "moe_top_k": 2},
        },
    ),
    Recipe(
        "Ernie4_5_MoeForCausalLM",
        "ernie4_5_moe",
        {
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_intermediate_size": 64,
            "moe_num_shared_experts": 1,
            "moe_layer_start_index": 1,
        },
    ),
    Recipe(
        "ExaoneMoeForCausalLM",
        "exaone_moe",
        EXPERTS
        | {
            "sliding_window": WINDOW,
            "layer_types": SLIDING,
            "num_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    Recipe("HunYuanMoEV1ForCausalLM", "hunyuan_v1_moe", {"num_experts": 4, "moe_topk": 2}),
    Recipe("HYV3ForCausalLM", "hy_v3", EXPERTS),
    Recipe(
        "LagunaForCausalLM",
        "laguna",
        EXPERTS
        | {
            "shared_expert_intermediate_size": 64,
            "sliding_window": WINDOW,
            "layer_types": SLIDING,
            "num_attention_heads_per_layer": [4] * NUM_LAYERS,
            "mlp_layer_types": DENSE_FIRST,
        },
        options=SIGMOID_ROUTING,
        note=SIGMOID_NOTE,
    ),
    Recipe(
        "Llama4ForCausalLM",
        "llama4_text",
        LOCAL
        | {
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": 256,
            "intermediate_size": 64,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 128,
            "floor_scale": 64,
        },
    ),
    Recipe(
        "MellumForCausalLM",
        "mellum",
        LOCAL | {"moe_intermediate_size": 64, "sliding_window": WINDOW, "layer_types": SLIDING},
    ),
    Recipe(
        "MiMoV2FlashForCausalLM",
        "mimo_v2_flash",
        ROUTED
        | MIMO_V2
        | {
            "v_head_dim": 32,
            "sliding_window": WINDOW,
            "layer_types": SLIDING,
            "mlp_layer_types": DENSE_FIRST,
        },
    ),
    Recipe(
        "MiniMaxM2ForCausalLM",
        "minimax_m2",
        LOCAL | {"rotary_dim": 16, "scoring_func": "sigmoid"},
        options=SIGMOID_ROUTING,
        note=SIGMOID_NOTE,
    ),
    Recipe("PhiMoEForCausalLM", "phimoe", LOCAL),
)
