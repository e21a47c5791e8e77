"""Builds the reference's model on the meta device with transformers, ready for its weights.

Imports torch and transformers: import it in the reference's own process. Code that comes with a model is
never run: a model that is neither in transformers nor mapped by `_CONFIGS` to one that is, is refused.

Legend: N decoder layers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from service.errors import EngineRefused
from service.plan.model_config import config_json
from service.proof.canary import no_reference
from service.proof.head_weights import FINAL_NORM_MODULE
from service.proof.reference_quantization import PLAIN, Quantization, quantization_of


@dataclass(frozen=True, slots=True)
class Skeleton:
    """A model on the meta device, the dotted names of its layers and final norm, and its quantization."""

    model: Any
    layers: tuple[str, ...]
    final_norm: str
    quantization: Quantization = PLAIN

    @property
    def stages(self) -> tuple[str, ...]:
        """The N layers and the final norm, in execution order."""
        return (*self.layers, self.final_norm)


def build_skeleton(folder: Path, dtype: torch.dtype) -> Skeleton:
    """Build the model of `folder` without reading weights; only buffers that no checkpoint holds get values.

    Raises:
        EngineRefused: transformers has no class for it, its layers cannot be identified, or the CPU cannot
            dequantize its weights (`canary`).
        ValueError, OSError: transformers cannot read the config.
    """
    config = reference_config(folder)
    quantization = quantization_of(config)
    # Eager attention supports sinks and soft caps, which the fused kernels ignore for some models.
    with torch.device("meta"):
        model: Any = _model_class(config)._from_config(config, dtype=dtype, attn_implementation="eager")
    _fill_buffers(model)
    final_norm = _final_norm(model)
    parent = final_norm.rpartition(".")[0]
    return Skeleton(model.eval(), _layers(model, parent), final_norm, quantization)


def reference_config(folder: Path) -> transformers.PreTrainedConfig:
    """Return the config of the reference. Raises UnknownModel, EngineRefused, ValueError, OSError."""
    raw = config_json(folder)
    named = _architecture(raw)
    if named in _CONFIGS:
        return transformers.AutoConfig.for_model(**_CONFIGS[named](raw))
    if raw.get("model_type") not in transformers.CONFIG_MAPPING:
        raise _no_class(named)
    return transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def _step3p7(raw: dict[str, Any]) -> dict[str, Any]:
    """Return a Step 3.7 config: Step 3.5 is its language model, with the same checkpoint tensor names."""
    ours = ("architectures", "auto_map", "model_type")
    text = {key: value for key, value in raw.items() if key not in ours and value is not None}
    return {
        "model_type": "step3p7",
        "text_config": text,
        "architectures": ["Step3p7ForConditionalGeneration"],
        "tie_word_embeddings": raw.get("tie_word_embeddings", False),
    }


_CONFIGS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {"Step3p5ForCausalLM": _step3p7}
"""Architectures that transformers has under another name: converts config.json to that config.

The weights follow transformers' own conversion mapping for that config.
"""


def _architecture(raw: dict[str, Any]) -> str:
    return str((raw.get("architectures") or [raw.get("model_type")])[0])


def _no_class(architecture: str) -> EngineRefused:
    what = f"transformers {transformers.__version__} has no class for {architecture}"
    return no_reference(f"{what}, and code that comes with a model is not run")


def _model_class(config: transformers.PreTrainedConfig) -> Any:  # noqa: ANN401 - a class made by transformers
    """Return the class that the checkpoint names, or the causal language model class of its config."""
    named = getattr(transformers, (config.architectures or [""])[0], None)
    if isinstance(named, type) and issubclass(named, transformers.PreTrainedModel):
        return named
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise _no_class(str((config.architectures or [config.model_type])[0]))
    return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]


def _fill_buffers(model: Any) -> None:  # noqa: ANN401 - as above
    """Initialize buffers that no checkpoint holds (rotary frequencies); leave the rest on the meta device."""
    for tensor in model.state_dict(keep_vars=True).values():
        tensor._is_hf_initialized = True
    for name, buffer in list(model.named_non_persistent_buffers()):
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, torch.empty_like(buffer, device="cpu"))
    model.initialize_weights()


def _final_norm(model: nn.Module) -> str:
    names: list[str] = [name for name, _ in model.named_modules() if FINAL_NORM_MODULE.fullmatch(name)]
    if len(names) != 1:
        raise _unclear(model, f"{len(names)} of its modules are named like a final norm")
    return names[0]


def _layers(model: Any, parent: str) -> tuple[str, ...]:  # noqa: ANN401 - as above
    """Return the decoder layers: the only module list of length N next to the final norm."""
    num_layers = model.config.get_text_config(decoder=True).num_hidden_layers
    children = model.get_submodule(parent).named_children()
    lists = [
        name for name, list_ in children if isinstance(list_, nn.ModuleList) and len(list_) == num_layers
    ]
    if len(lists) != 1:
        raise _unclear(model, f"{len(lists)} module lists of {num_layers} stand beside its final norm")
    prefix = f"{parent}.{lists[0]}" if parent else lists[0]
    return tuple(f"{prefix}.{layer}" for layer in range(num_layers))


def _unclear(model: nn.Module, what: str) -> EngineRefused:
    return no_reference(f"the decoder layers of {type(model).__name__} cannot be told: {what}")
