"""Recipes of architectures whose code is not in transformers, and which the engine computes as another does.

The model is made as that other one and carries the name, so that the engine takes the class of the name.
"""

from tests.architectures.dense import GRANITE
from tests.architectures.experts import SIGMOID_NOTE, SIGMOID_ROUTING
from tests.architectures.recipe import HIDDEN_SIZE, NUM_LAYERS, Recipe

_LLAMAS = ("LLaMAForCausalLM", "IQuestCoderForCausalLM", "InternLM3ForCausalLM", "TeleChat3ForCausalLM")
_OWN_CODE = {
    "DeepseekForCausalLM": "deepseek",
    "K2HorizonForCausalLM": "k2_horizon",
    "MiMoV2ForCausalLM": "mimo_v2",
    "MistralLarge3ForCausalLM": "mistral_large_3",
    "NanbeigeForCausalLM": "nanbeige",
    "NemotronHPuzzleForCausalLM": "nemotron_h_puzzle",
    "Plamo3ForCausalLM": "plamo3",
    "SarvamMLAForCausalLM": "sarvam_mla",
    "Step1ForCausalLM": "step1",
    "TeleChat2ForCausalLM": "telechat",
    "TeleFLMForCausalLM": "teleflm",
}
MINICPM = {"scale_emb": 12.0, "scale_depth": 1.4, "dim_model_base": 64}
AS_GRANITE = {
    "embedding_multiplier": MINICPM["scale_emb"],
    "residual_multiplier": MINICPM["scale_depth"] / NUM_LAYERS**0.5,
    "logits_scaling": HIDDEN_SIZE / MINICPM["dim_model_base"],
    "attention_multiplier": 32**-0.5,
}

_WITHOUT_A_HEAD = {
    "Emu3ForConditionalGeneration": "emu3_text_model",
    "Glm5NextForCausalLM": "glm5_next_text",
    "MuseGlimmerForCausalLM": "muse_glimmer_text",
    "VibeVoiceAsrForConditionalGeneration": "vibevoice_asr",
}
"""transformers has no class with a language model's head for these, so that nothing tells what is right."""

NAMESAKES = (
    *(Recipe(name, "llama", note="made as llama") for name in _LLAMAS),
    Recipe("MiMoForCausalLM", "qwen2", note="made as qwen2"),
    Recipe("MiniCPMForCausalLM", "granite", GRANITE | AS_GRANITE | MINICPM, note="made as granite"),
    Recipe(
        "Step3p5ForCausalLM",
        "step3p5",
        made_by="tests.support.step3p5:step3p5_target",
        num_layers=6,
        options=SIGMOID_ROUTING,
        note=SIGMOID_NOTE,
    ),
    *(Recipe(name, model_type) for name, model_type in (_OWN_CODE | _WITHOUT_A_HEAD).items()),
)
