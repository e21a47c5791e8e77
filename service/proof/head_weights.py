"""Finds a target's final norm and output head by name in its safetensors files; nothing else is read.

Imports torch: import it lazily. Names and norm kinds come from small tables. What they do not cover is
refused, because with a guessed norm every logit check would fail, or worse, pass.

Legend: H hidden size, V vocabulary.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from schemas.dataset.norm import NormWeights
from schemas.identity import FinalNorm, NormKind
from service.errors import EngineRefused, UnknownModel
from service.plan.model_config import config_json

_WRAPPERS = r"(?:(?:model|language_model|text_model|thinker|llm|transformer|backbone|gpt_neox|decoder)\.)*"
_NORMS = r"(?:norm|ln_f|norm_f|final_norm|final_layernorm|final_layer_norm|embedding_norm)"
_HEADS = r"(?:lm_head|embed_out|output_layer|output)"
_EMBEDDINGS = r"(?:embed_tokens|embed_in|wte|tok_embeddings|word_embeddings|embeddings)"
_EMBEDDING = _WRAPPERS + r"(?:embeddings?\.)?" + _EMBEDDINGS + r"\.weight"

FINAL_NORM_MODULE = re.compile(_WRAPPERS + _NORMS)
"""The full dotted name of the final norm as a module or, with `.weight` appended, in a checkpoint.

Wrappers are listed explicitly, so that the norms of vision towers, encoders and `mtp` blocks never match.
"""

_NORM_KINDS: dict[str, NormKind] = {
    **dict.fromkeys(("gemma", "gemma2", "gemma3", "gemma3_text", "rnj1"), "gemma_rmsnorm"),
    **dict.fromkeys(("vaultgemma", "recurrent_gemma", "minimax_m3_vl_text"), "gemma_rmsnorm"),
    **dict.fromkeys(("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), "gemma_rmsnorm"),
    **dict.fromkeys(("qwen3_next", "step3p5"), "gemma_rmsnorm"),
    **dict.fromkeys(("gpt2", "gptj", "gpt_bigcode", "gpt_neox", "codegen", "bloom", "opt"), "layernorm"),
    **dict.fromkeys(("phi", "phimoe", "starcoder2", "stablelm", "falcon", "persimmon"), "layernorm"),
    **dict.fromkeys(("cohere", "cohere2", "dbrx", "orion", "biogpt", "mpt", "jais2"), "layernorm"),
}
"""By `model_type`, if it is not a plain RMSNorm."""
_LAYERNORM_EPS = {"olmo": 1e-5, "opt": 1e-5, "dbrx": 1e-5}
"""LayerNorms whose epsilon is in the model's code, not in its config."""
_BARE_LAYERNORMS = frozenset({"olmo"})
"""Models whose final norm has no weight."""
_REFUSED_NORMS = {"nemotron": "a LayerNorm that multiplies by (1 + weight)"}
WRAPPER_TIES = "whole_model_ties_word_embeddings"
"""Added to a text config: whether the enclosing config ties the embeddings."""
_RMS_EPS_KEYS = ("rms_norm_eps", "rms_norm_epsilon", "norm_eps", "layer_norm_epsilon", "layernorm_epsilon")
_LAYERNORM_EPS_KEYS = ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps", "rms_norm_eps")
_FLOATS = frozenset({torch.bfloat16, torch.float16, torch.float32})


@dataclass(frozen=True, slots=True)
class HeadWeights:
    """The output head as stored, on CPU, cut to the config's vocabulary.

    With z = `weight_VH` @ y + `bias_V`, a logit is `scale * z`, or `scale * soft_cap * tanh(z / soft_cap)`.
    """

    weight_VH: torch.Tensor
    bias_V: torch.Tensor | None
    scale: float
    soft_cap: float | None

    def shaped(self, bare: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Turn products of states and weights into logits: apply bias, soft cap and scale."""
        if bias is not None:
            bare = bare + bias
        if self.soft_cap is not None:
            bare = torch.tanh(bare / self.soft_cap) * self.soft_cap
        return bare * self.scale

    def slope(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the derivative of each logit with respect to its product of state and weight."""
        if self.soft_cap is None:
            return torch.full_like(logits, self.scale)
        return self.scale * (1 - (logits / (self.scale * self.soft_cap)).square())


def text_config(folder: Path) -> dict[str, Any]:
    """Return the language model's part of `config.json`, with defaults if transformers knows the model.

    Raises EngineRefused.
    """
    from transformers import CONFIG_MAPPING, AutoConfig

    try:
        raw = config_json(folder)
        if raw.get("model_type") in CONFIG_MAPPING:
            config = AutoConfig.from_pretrained(folder, local_files_only=True)
            known: dict[str, Any] = config.get_text_config().to_dict()
            # Some multimodal checkpoints set it in the outer config, others in the text config.
            return known | {WRAPPER_TIES: bool(getattr(config, "tie_word_embeddings", False))}
    except (UnknownModel, OSError, ValueError) as error:
        raise _refused(folder, f"config.json cannot be read: {error}") from error
    text: dict[str, Any] = raw.get("text_config", raw)
    return text


def read_norm(folder: Path, config: Mapping[str, Any]) -> NormWeights:
    """Read the final norm of the model in `folder`. Raises EngineRefused, naming what is unclear."""
    files = tensor_files(folder)
    weight_name = _find(files, FINAL_NORM_MODULE.pattern + r"\.weight")
    bias_name = _find(files, FINAL_NORM_MODULE.pattern + r"\.bias")
    model_type = str(config.get("model_type"))
    norm = norm_kind(folder, model_type, config, has_bias=bias_name is not None)
    if weight_name is None and model_type not in _BARE_LAYERNORMS:
        raise _refused(folder, "no tensor is named like a final norm (model.norm.weight and its kin)")
    weight_H = _read(files, weight_name) if weight_name else torch.ones(int(config["hidden_size"]))
    return NormWeights(norm, weight_H, _read(files, bias_name) if bias_name else None)


def norm_weight(folder: Path) -> torch.Tensor | None:
    """Return the weight of the final norm of the model in `folder`, or None. Raises EngineRefused."""
    files = tensor_files(folder)
    name = _find(files, FINAL_NORM_MODULE.pattern + r"\.weight")
    return None if name is None else _read(files, name)


def read_embedding(folder: Path) -> torch.Tensor:
    """Read the input embedding [V, H] of the model in `folder`. Raises EngineRefused."""
    files = tensor_files(folder)
    name = _find(files, _EMBEDDING)
    if name is None:
        raise _refused(
            folder, "no tensor is named like an input embedding (model.embed_tokens.weight and its kin)"
        )
    return _read(files, name)


def read_head(folder: Path, config: Mapping[str, Any]) -> HeadWeights:
    """Read the output head, or the embedding tied to it. Raises EngineRefused, naming what is missing."""
    files = tensor_files(folder)
    own = _find(files, _WRAPPERS + _HEADS + r"\.weight")
    embedding = _find(files, _EMBEDDING)
    tied = bool(config.get("tie_word_embeddings", own is None))
    name = (embedding or own) if tied else own
    if name is None and config.get(WRAPPER_TIES):
        name = embedding
    if name is None:
        what = "no tensor is named like an output head (lm_head.weight and its kin)"
        raise _refused(folder, f"{what}, and tie_word_embeddings is {tied}")
    bias_name = _find(files, _WRAPPERS + _HEADS + r"\.bias")
    weight_VH = _read(files, name)
    vocab_size = int(config.get("vocab_size", len(weight_VH)))
    if len(weight_VH) < vocab_size:
        raise _refused(folder, f"{name} has {len(weight_VH)} rows for a vocabulary of {vocab_size}")
    cap = config.get("final_logit_softcapping")
    return HeadWeights(
        weight_VH=weight_VH[:vocab_size],
        bias_V=_read(files, bias_name)[:vocab_size] if bias_name else None,
        scale=_logit_scale(config),
        soft_cap=float(cap) if cap else None,
    )


def _logit_scale(config: Mapping[str, Any]) -> float:
    """Return the factor of the logits. Granite divides by `logits_scaling`, HyperCLOVA multiplies by it."""
    scale = float(config.get("logit_scale") or 1.0) * float(config.get("lm_head_multiplier") or 1.0)
    if scaling := config.get("logits_scaling"):
        scale = scale * scaling if config.get("model_type") == "hyperclovax" else scale / scaling
    if (base := config.get("dim_model_base")) and str(config.get("model_type")).startswith("minicpm"):
        # MiniCPM divides the normed state instead, which is mathematically the same.
        scale *= base / config["hidden_size"]
    if width := config.get("mup_width_multiplier"):
        scale /= width
    return float(scale)


def norm_kind(folder: Path, model_type: str, config: Mapping[str, Any], *, has_bias: bool) -> FinalNorm:
    """Return kind and epsilon of a model type's final norm. Raises EngineRefused, naming what is unclear."""
    if model_type in _LAYERNORM_EPS:
        return FinalNorm(kind="layernorm", eps=_LAYERNORM_EPS[model_type])
    if model_type in _REFUSED_NORMS:
        what = f"the final norm of {model_type} is {_REFUSED_NORMS[model_type]}"
        raise _refused(folder, f"{what}, which is not supported")
    kind = _NORM_KINDS.get(model_type, "rmsnorm")
    if model_type == "cohere2_moe":
        # Its config decides: it is an RMSNorm if `rms_norm_eps` is set.
        kind = "layernorm" if config.get("rms_norm_eps") is None else "rmsnorm"
    if has_bias and kind != "layernorm":
        raise _refused(
            folder, f"the final norm has a bias, and {model_type!r} is not known to end in a LayerNorm"
        )
    keys = _LAYERNORM_EPS_KEYS if kind == "layernorm" else _RMS_EPS_KEYS
    eps = next((config[key] for key in keys if config.get(key) is not None), None)
    if eps is None:
        raise _refused(folder, f"config.json names no epsilon of the final norm ({', '.join(keys)})")
    return FinalNorm(kind=kind, eps=float(eps))


def tensor_files(folder: Path) -> dict[str, Path]:
    """Return the file of every tensor, from the weight index or a single file. Raises EngineRefused."""
    index = folder / "model.safetensors.index.json"
    single = folder / "model.safetensors"
    try:
        if index.is_file():
            files = json.loads(index.read_text())["weight_map"]
            return {name: folder / Path(file).name for name, file in files.items()}
        if not single.is_file():
            files_of_any_name = sorted(folder.glob("*.safetensors"))
            if len(files_of_any_name) != 1:
                what = "found neither model.safetensors.index.json nor a single safetensors file"
                raise _refused(folder, what, "the proof against the model needs its weights as safetensors")
            single = files_of_any_name[0]
        with safe_open(single, framework="pt") as file:
            return dict.fromkeys(file.keys(), single)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, SafetensorError) as error:
        raise _refused(folder, f"the weight index cannot be read: {error}") from error


def _find(names: Iterable[str], pattern: str) -> str | None:
    """Return the one name that fully matches `pattern`, or None. Raises EngineRefused if several do."""
    matches = [name for name in names if re.fullmatch(pattern, name)]
    if len(matches) > 1:
        raise EngineRefused(
            f"cannot tell the final norm or output head among {sorted(matches)}", field="model"
        )
    return matches[0] if matches else None


def _read(files: Mapping[str, Path], name: str) -> torch.Tensor:
    try:
        with safe_open(files[name], framework="pt") as file:
            # A copy: the file is memory-mapped, so overwriting it would change the values.
            tensor: torch.Tensor = file.get_tensor(name).clone()
    except (OSError, SafetensorError) as error:
        raise _refused(files[name], f"{name} cannot be read: {error}") from error
    if tensor.dtype not in _FLOATS:
        raise _refused(files[name], f"{name} is {tensor.dtype}, a quantized head")
    return tensor


def _refused(path: Path, what: str, cure: str | None = None) -> EngineRefused:
    return EngineRefused(f"{path}: {what}", field="model", cure=cure)
