"""The reference's model without its weights: built by transformers on the meta device, ready to be filled.

Imports torch and transformers: import it in the reference's own process. Code that comes with a model is
never run: what transformers lacks, and `_CONFIGS` does not map to something that it has, is refused.

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
    """A model on the meta device, the dotted names of its layers and final norm, the form of its weights."""

    model: Any
    layers: tuple[str, ...]
    final_norm: str
    quantization: Quantization = PLAIN

    @property
    def stages(self) -> tuple[str, ...]:
        """The N layers and the final norm, in the order in which a forward pass enters them."""
        return (*self.layers, self.final_norm)


def build_skeleton(folder: Path, dtype: torch.dtype) -> Skeleton:
    """Build the model of `folder` without reading its weights; buffers that no file holds are real.

    Raises:
        EngineRefused: transformers has no class for it, its layers cannot be told, or its weights are of a
            kind that the CPU cannot read (`canary`).
        ValueError, OSError: as transformers says of the config.
    """
    config = read_config(folder)
    quantization = quantization_of(config)
    # Eager attention knows sinks and soft caps, which the fused kernels leave out for some models.
    with torch.device("meta"):
        model: Any = _model_class(config)._from_config(config, dtype=dtype, attn_implementation="eager")
    _fill_buffers(model)
    final_norm = _final_norm(model)
    parent = final_norm.rpartition(".")[0]
    return Skeleton(model.eval(), _layers(model, parent), final_norm, quantization)


def read_config(folder: Path) -> transformers.PreTrainedConfig:
    """Return the config of the reference. Raises UnknownModel, EngineRefused, ValueError, OSError."""
    raw = config_json(folder)
    named = _architecture(raw)
    if named in _CONFIGS:
        return transformers.AutoConfig.for_model(**_CONFIGS[named](raw))
    if raw.get("model_type") not in transformers.CONFIG_MAPPING:
        raise _no_class(named)
    return transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def _step3p7(raw: dict[str, Any]) -> dict[str, Any]:
    """Step 3.5 is the language model of Step 3.7, whose checkpoint has the same tensor names."""
    ours = ("architectures", "auto_map", "model_type")
    text = {key: value for key, value in raw.items() if key not in ours and value is not None}
    return {
        "model_type": "step3p7",
        "text_config": text,
        "architectures": ["Step3p7ForConditionalGeneration"],
        "tie_word_embeddings": raw.get("tie_word_embeddings", False),
    }


_CONFIGS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {"Step3p5ForCausalLM": _step3p7}
"""Architectures that transformers has under another name: their config.json -> a config of that one.

The weights go the way that transformers' own conversion mapping for that config says."""


def _architecture(raw: dict[str, Any]) -> str:
    return str((raw.get("architectures") or [raw.get("model_type")])[0])


def _no_class(architecture: str) -> EngineRefused:
    what = f"transformers {transformers.__version__} has no class for {architecture}"
    return no_reference(f"{what}, and code that comes with a model is not run")


def _model_class(config: transformers.PreTrainedConfig) -> Any:  # noqa: ANN401 - a class made by transformers
    """Return the class that the checkpoint names, or the causal language model of its config."""
    named = getattr(transformers, (config.architectures or [""])[0], None)
    if isinstance(named, type) and issubclass(named, transformers.PreTrainedModel):
        return named
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise _no_class(str((config.architectures or [config.model_type])[0]))
    return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]


def _fill_buffers(model: Any) -> None:  # noqa: ANN401 - as above
    """Give buffers that no checkpoint holds (rotary frequencies) their values; leave the rest on meta."""
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
    """Return the decoder layers: the module list of N beside the final norm."""
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
