"""Recipes of decoders without experts."""

from tests.architectures.recipe import HIDDEN_SIZE, MAX_POSITION, NUM_LAYERS, WINDOW, Recipe

SLIDING = ["sliding_attention", "full_attention"] * (NUM_LAYERS // 2)
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": MAX_POSITION // 4,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
GRANITE = {
    "embedding_multiplier": 12.0,
    "logits_scaling": 8.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.0625,
}
GPT2_SHAPE = {
    "n_embd": HIDDEN_SIZE,
    "n_layer": NUM_LAYERS,
    "n_head": 4,
    "n_positions": MAX_POSITION,
    "n_inner": 256,
}
GEMMA3_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
}

DENSE = (
    Recipe("LlamaForCausalLM", "llama"),
    Recipe("LlamaForCausalLM", "llama", {"rope_parameters": LLAMA3_ROPE}, variant="llama3 rope scaling"),
    Recipe("LlamaForCausalLM", "llama", {"rope_parameters": YARN}, variant="YaRN rope scaling"),
    Recipe("LlamaForCausalLM", "llama", {"rope_parameters": LINEAR}, variant="linear rope scaling"),
    Recipe("LlamaForCausalLM", "llama", {"rope_parameters": DYNAMIC}, variant="dynamic rope scaling"),
    Recipe("LlamaForCausalLM", "llama", {"tie_word_embeddings": True}, variant="tied embeddings"),
    Recipe("Qwen2ForCausalLM", "qwen2"),
    Recipe("Qwen3ForCausalLM", "qwen3"),
    Recipe("MistralForCausalLM", "mistral", {"sliding_window": WINDOW}),
    Recipe("Ministral3ForCausalLM", "ministral3"),
    Recipe("PhiForCausalLM", "phi"),
    Recipe("Phi3ForCausalLM", "phi3"),
    Recipe("OlmoForCausalLM", "olmo"),
    Recipe("Olmo2ForCausalLM", "olmo2"),
    Recipe("Olmo3ForCausalLM", "olmo3", {"sliding_window": WINDOW, "layer_types": SLIDING}),
    Recipe("GraniteForCausalLM", "granite", GRANITE),
    Recipe(
        "GraniteSWAForCausalLM", "granite_swa", GRANITE | {"sliding_window": WINDOW, "layer_types": SLIDING}
    ),
    Recipe("GemmaForCausalLM", "gemma"),
    Recipe(
        "Gemma2ForCausalLM",
        "gemma2",
        {
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 32,
            "final_logit_softcapping": 8.0,
            "attn_logit_softcapping": 20.0,
            "tie_word_embeddings": True,
        },
    ),
    Recipe(
        "Gemma3ForCausalLM",
        "gemma3_text",
        {
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 32,
            "layer_types": SLIDING,
            "rope_parameters": GEMMA3_ROPE,
            "tie_word_embeddings": True,
        },
    ),
    Recipe(
        "Gemma3nForCausalLM",
        "gemma3n_text",
        {
            "layer_types": SLIDING,
            "sliding_window": WINDOW,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 32,
            "vocab_size_per_layer_input": 512,
            "laurel_rank": 16,
            "intermediate_size": [256] * NUM_LAYERS,
            "activation_sparsity_pattern": [0.0] * NUM_LAYERS,
            "tie_word_embeddings": True,
        },
    ),
    Recipe(
        "Gemma4ForCausalLM",
        "gemma4_text",
        {
            "layer_types": SLIDING,
            "sliding_window": WINDOW,
            "vocab_size_per_layer_input": 512,
            "hidden_size_per_layer_input": 32,
            "global_head_dim": 64,
            "num_kv_shared_layers": 2,
            "tie_word_embeddings": True,
        },
    ),
    Recipe(
        "VaultGemmaForCausalLM",
        "vaultgemma",
        {"sliding_window": WINDOW, "query_pre_attn_scalar": 32, "layer_types": SLIDING},
    ),
    Recipe(
        "ApertusForCausalLM",
        "apertus",
        dtype="bfloat16",
        note="the engine keeps this activation's parameters in bfloat16: 4e-3 off in float32",
    ),
    Recipe("ArceeForCausalLM", "arcee"),
    Recipe(
        "CwmForCausalLM",
        "cwm",
        {"bos_token_id": 0, "eos_token_id": 1, "sliding_window": WINDOW, "layer_types": SLIDING},
    ),
    # The engine's class ties the head whatever the config says; published models are tied.
    Recipe("CohereForCausalLM", "cohere", {"logit_scale": 0.0625, "tie_word_embeddings": True}),
    Recipe("Cohere2ForCausalLM", "cohere2", {"sliding_window": WINDOW, "layer_types": SLIDING}),
    Recipe("Ernie4_5ForCausalLM", "ernie4_5"),
    Recipe("Exaone4ForCausalLM", "exaone4", {"sliding_window": WINDOW, "layer_types": SLIDING}),
    Recipe("FalconForCausalLM", "falcon", {"ffn_hidden_size": 256}),
    Recipe("GPT2LMHeadModel", "gpt2", GPT2_SHAPE | {"tie_word_embeddings": True}),
    Recipe("GPTBigCodeForCausalLM", "gpt_bigcode", GPT2_SHAPE),
    Recipe("GPTJForCausalLM", "gptj", GPT2_SHAPE | {"rotary_dim": 32}),
    Recipe("GPTNeoXForCausalLM", "gpt_neox"),
    Recipe("GlmForCausalLM", "glm"),
    Recipe("Glm4ForCausalLM", "glm4"),
    Recipe("HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense"),
    Recipe("HyperCLOVAXForCausalLM", "hyperclovax"),
    Recipe("Jais2ForCausalLM", "jais2"),
    Recipe("NemotronForCausalLM", "nemotron"),
    Recipe("OPTForCausalLM", "opt", {"ffn_dim": 256, "word_embed_proj_dim": HIDDEN_SIZE}),
    Recipe("BloomForCausalLM", "bloom", {"n_layer": NUM_LAYERS, "n_head": 4}),
    Recipe("SeedOssForCausalLM", "seed_oss"),
    Recipe("SmolLM3ForCausalLM", "smollm3"),
    Recipe("StableLmForCausalLM", "stablelm"),
    Recipe("Starcoder2ForCausalLM", "starcoder2", {"sliding_window": WINDOW}),
)
