"""Recipes of the language side of models that also see: their jobs send text only."""

from typing import Any

from tests.architectures.dense import GEMMA3_ROPE, SLIDING
from tests.architectures.experts import DENSE_FIRST, EXPERTS, LOCAL, ROUTED
from tests.architectures.hybrids import EVERY_FOURTH, LINEAR, NO_PREFIX_CACHE, TORCHVISION
from tests.architectures.recipe import HIDDEN_SIZE, NUM_LAYERS, WINDOW, Recipe

TEXT_ONLY = {"language_model_only": True}
QWEN_VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": HIDDEN_SIZE,
}
SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
VISION = SMALL | {"image_size": 56, "patch_size": 14}
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
QWEN_TOKENS: dict[str, Any] = {
    "image_token_id": 500,
    "video_token_id": 501,
    "vision_start_token_id": 502,
    "vision_end_token_id": 503,
}
DEEPSTACK = QWEN_VISION | {"deepstack_visual_indexes": [0, 1]}


def _multimodal(
    name: str,
    model_type: str,
    text: dict[str, Any],
    vision: dict[str, Any],
    options: dict[str, Any] | None = None,
    **more: Any,
) -> Recipe:
    dtype = more.pop("dtype", "float32")
    return Recipe(
        name,
        model_type,
        {"vision_config": vision} | more,
        text=text,
        dtype=dtype,
        options=TEXT_ONLY | (options or {}),
        loader="AutoModelForImageTextToText",
        note=TORCHVISION,
    )


MINIMAX_M3: dict[str, Any] = LOCAL | {
    "intermediate_size": 64,
    "shared_intermediate_size": 64,
    "dense_intermediate_size": 256,
    "rotary_dim": 16,
    "mlp_layer_types": DENSE_FIRST,
    "layer_types": ["full_attention"] * NUM_LAYERS,
}
GLM5_NEXT: dict[str, Any] = ROUTED | {
    "q_lora_rank": 64,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
    "head_dim": 0,
    "num_key_value_heads": 4,
    "index_topk": 64,
    "index_head_dim": 32,
    "index_n_heads": 4,
    "linear_head_dim": 128,
    "linear_num_heads": 4,
    "mlp_layer_types": DENSE_FIRST,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "indexed_attention"] * 2,
    "indexer_types": ["full"] * NUM_LAYERS,
}

MULTIMODAL = (
    _multimodal(
        "Qwen2_5_VLForConditionalGeneration",
        "qwen2_5_vl",
        {"rope_parameters": MROPE},
        QWEN_VISION,
        **QWEN_TOKENS,
    ),
    _multimodal(
        "Qwen3VLForConditionalGeneration", "qwen3_vl", {"rope_parameters": MROPE}, DEEPSTACK, **QWEN_TOKENS
    ),
    _multimodal(
        "Qwen3VLMoeForConditionalGeneration",
        "qwen3_vl_moe",
        EXPERTS | {"rope_parameters": MROPE},
        DEEPSTACK,
        **QWEN_TOKENS,
    ),
    _multimodal(
        "Qwen3_5ForConditionalGeneration",
        "qwen3_5",
        LINEAR | {"layer_types": EVERY_FOURTH},
        QWEN_VISION,
        NO_PREFIX_CACHE,
        dtype="bfloat16",
        **QWEN_TOKENS,
    ),
    _multimodal(
        "Qwen3_5MoeForConditionalGeneration",
        "qwen3_5_moe",
        EXPERTS | LINEAR | {"layer_types": EVERY_FOURTH, "shared_expert_intermediate_size": 64},
        QWEN_VISION,
        NO_PREFIX_CACHE,
        dtype="bfloat16",
        **QWEN_TOKENS,
    ),
    _multimodal(
        "Mistral3ForConditionalGeneration",
        "mistral3",
        {"model_type": "mistral"},
        VISION | {"model_type": "pixtral"},
        image_token_index=500,
        tie_word_embeddings=False,
    ),
    _multimodal(
        "LlavaForConditionalGeneration",
        "llava",
        {"model_type": "llama"},
        VISION | {"model_type": "clip_vision_model"},
        image_token_index=500,
    ),
    _multimodal(
        "Llama4ForConditionalGeneration",
        "llama4",
        LOCAL
        | {
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": 256,
            "intermediate_size": 64,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 128,
            "floor_scale": 64,
        },
        VISION | {"vision_output_dim": 64, "projector_input_dim": 64, "projector_output_dim": 64},
        image_token_index=500,
        boi_token_index=501,
        eoi_token_index=502,
    ),
    _multimodal(
        "Gemma3ForConditionalGeneration",
        "gemma3",
        {
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 32,
            "layer_types": SLIDING,
            "rope_parameters": GEMMA3_ROPE,
        },
        VISION,
        image_token_index=500,
        boi_token_index=501,
        eoi_token_index=502,
        mm_tokens_per_image=4,
    ),
    _multimodal(
        "Gemma4ForConditionalGeneration",
        "gemma4",
        {
            "layer_types": SLIDING,
            "sliding_window": WINDOW,
            "vocab_size_per_layer_input": 512,
            "hidden_size_per_layer_input": 32,
            "global_head_dim": 64,
            "pad_token_id": 0,
        },
        SMALL
        | {
            "num_key_value_heads": 2,
            "head_dim": 32,
            "position_embedding_size": 64,
        },
        image_token_id=500,
        video_token_id=501,
        audio_token_id=502,
        boi_token_id=503,
        eoi_token_id=504,
        boa_token_id=505,
        eoa_token_index=506,
    ),
    _multimodal(
        "HunYuanVLForConditionalGeneration",
        "hunyuan_vl",
        {"rope_parameters": MROPE | {"mrope_section": [4, 4, 4, 4]}},
        SMALL
        | {
            "num_key_value_heads": 2,
            "out_hidden_size": HIDDEN_SIZE,
            "text_hidden_size": HIDDEN_SIZE,
            "img_max_token_num": 64,
            "max_image_size": 64,
            "min_image_size": 32,
        },
        image_token_id=500,
        im_start_id=501,
        im_end_id=502,
        im_newline_id=503,
    ),
    _multimodal(
        "MuseGlimmerForConditionalGeneration",
        "muse_glimmer",
        {
            "sliding_window": WINDOW,
            "layer_types": SLIDING,
            "layer_rope_theta": [10000.0, 0] * (NUM_LAYERS // 2),
        },
        SMALL
        | {
            "layer_types": ["window_attention", "full_attention"],
        },
        image_token_id=500,
        video_token_id=501,
        out_hidden_size=HIDDEN_SIZE,
        projector_hidden_size=64,
    ),
    _multimodal(
        "MiniMaxM3SparseForConditionalGeneration",
        "minimax_m3_vl",
        MINIMAX_M3,
        VISION,
        image_token_index=500,
        video_token_index=501,
        projector_hidden_size=HIDDEN_SIZE,
        merged_hidden_size=4 * HIDDEN_SIZE,
    ),
    Recipe("MiniMaxM3SparseForCausalLM", "minimax_m3_vl_text", MINIMAX_M3, note=TORCHVISION),
    _multimodal(
        "Glm5NextForConditionalGeneration",
        "glm5_next",
        GLM5_NEXT,
        QWEN_VISION | {"image_size": 56, "projection_intermediate_size": 64},
        NO_PREFIX_CACHE,
        dtype="bfloat16",
        image_token_id=500,
        video_token_id=501,
        image_start_token_id=502,
        image_end_token_id=503,
        video_start_token_id=504,
        video_end_token_id=505,
    ),
)
