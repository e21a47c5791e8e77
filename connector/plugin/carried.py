"""Which of the engine's classes the plug-in carries. Imports nothing."""

from dataclasses import dataclass

MODELS = "vllm.model_executor.models"

BACKEND = f"{MODELS}.transformers"
"""The engine's Transformers backend, to which vLLM's registry maps many architectures."""
BACKEND_CLASSES = (
    "TransformersForCausalLM",
    "TransformersMoEForCausalLM",
    "TransformersMultiModalForCausalLM",
    "TransformersMultiModalMoEForCausalLM",
)


@dataclass(frozen=True, slots=True)
class Carried:
    """A class of the engine that lacks only the lines that return states.

    `decoder` is the class that loops over the layers; None if it returns states already, or is looked up in
    the registry (a multimodal model's language model). For `sums` see `RecordingDecoder`.
    """

    module: str
    model: str
    decoder: str | None = None
    sums: bool = True


CARRIED: dict[str, Carried] = {
    "Step3p5ForCausalLM": Carried("step3p5", "Step3p5ForCausalLM", "Step3p5Model", sums=False),
    "MixtralForCausalLM": Carried("mixtral", "MixtralForCausalLM", "MixtralModel"),
    "OlmoeForCausalLM": Carried("olmoe", "OlmoeForCausalLM", "OlmoeModel"),
    "Qwen2MoeForCausalLM": Carried("qwen2_moe", "Qwen2MoeForCausalLM", "Qwen2MoeModel"),
    "Glm4MoeForCausalLM": Carried("glm4_moe", "Glm4MoeForCausalLM", "Glm4MoeModel"),
    "GemmaForCausalLM": Carried("gemma", "GemmaForCausalLM", "GemmaModel"),
    "Gemma2ForCausalLM": Carried("gemma2", "Gemma2ForCausalLM", "Gemma2Model"),
    "Gemma3ForCausalLM": Carried("gemma3", "Gemma3ForCausalLM", "Gemma3Model"),
    "Gemma3ForConditionalGeneration": Carried("gemma3_mm", "Gemma3ForConditionalGeneration"),
    "Glm4ForCausalLM": Carried("glm4", "Glm4ForCausalLM"),
    "CohereForCausalLM": Carried("commandr", "CohereForCausalLM", "CohereModel", sums=False),
    "GraniteMoeForCausalLM": Carried("granitemoe", "GraniteMoeForCausalLM", "GraniteMoeModel", sums=False),
    "GraniteMoeSharedForCausalLM": Carried(
        "granitemoeshared", "GraniteMoeSharedForCausalLM", "GraniteMoeSharedModel", sums=False
    ),
    "NemotronForCausalLM": Carried("nemotron", "NemotronForCausalLM", "NemotronModel"),
    "Exaone4ForCausalLM": Carried("exaone4", "Exaone4ForCausalLM", "Exaone4Model", sums=False),
    "StableLmForCausalLM": Carried("stablelm", "StablelmForCausalLM", "StableLMEpochModel", sums=False),
}
