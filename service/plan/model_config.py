"""`config.json` -> the few numbers of a target that planning needs, for any model type."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from schemas.request import Dtype
from service.errors import OptionRefused, UnknownModel

TEXT_CONFIGS = ("text_config", "llm_config", "language_config", "thinker_config", "decoder")
"""Where multimodal configs keep the language model's part."""
NUM_LAYERS_KEYS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
HIDDEN_SIZE_KEYS = ("hidden_size", "n_embd", "d_model", "dim")
VOCAB_SIZE_KEYS = ("vocab_size", "padded_vocab_size")
LENGTH_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
)
DEFAULT_LENGTH = 2048
"""What the engine assumes of a config that names no length."""

LENGTH_INCLUDES_SCALING = frozenset(
    {"su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling"}
)
"""Rope types whose `max_position_embeddings` is the scaled length already."""
SCALED_LENGTH_MODELS = "gemma3"
"""Part of the model types of which that is true for every rope type."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What `config.json` says. `max_model_len` is the engine's: prompt and answer together."""

    architectures: tuple[str, ...]
    num_layers: int
    hidden_size: int
    vocab_size: int
    dtype: Dtype
    max_model_len: int


def read_config(folder: Path, dtype: str) -> ModelConfig:
    """Read `folder`/config.json; `dtype` is the request's: `auto` takes the config's, or float32.

    Raises UnknownModel (field `model`), OptionRefused (field `dtype`).
    """
    try:
        whole = json.loads((folder / "config.json").read_bytes(), object_hook=_special_float)
    except (OSError, ValueError) as error:
        raise _refused(f"config.json cannot be read: {error}") from error
    if not isinstance(whole, dict):
        raise _refused("config.json is not an object")
    text = next((whole[key] for key in TEXT_CONFIGS if isinstance(whole.get(key), dict)), whole)
    values = _Values(whole, text)
    return ModelConfig(
        architectures=tuple(str(name) for name in whole.get("architectures") or ()),
        num_layers=values.number(NUM_LAYERS_KEYS),
        hidden_size=values.number(HIDDEN_SIZE_KEYS),
        vocab_size=values.number(VOCAB_SIZE_KEYS),
        dtype=_dtype(dtype, values),
        max_model_len=_max_model_len(values),
    )


def _refused(detail: str) -> UnknownModel:
    return UnknownModel(detail, field="model", cure="give a causal language model in the transformers format")


def _special_float(value: dict[str, Any]) -> dict[str, Any] | float:
    """Return the number that transformers writes as {"__float__": "Infinity"}, because JSON has none such."""
    return float(value["__float__"]) if value.keys() == {"__float__"} else value


class _Values:
    """Looks keys up in the text part, then in the whole config, then among its class's defaults."""

    def __init__(self, whole: Mapping[str, Any], text: Mapping[str, Any]) -> None:
        self._given = (text, whole)
        self._whole = whole
        self._completed: object | None = None

    def find(self, keys: tuple[str, ...]) -> Any:  # noqa: ANN401 - a JSON value
        for level in self._given:
            for key in keys:
                if level.get(key) is not None:
                    return level[key]
        return None

    def number(self, keys: tuple[str, ...]) -> int:
        value = self.find(keys)
        if value is None:
            # Published configs leave out what equals the class's default (Gemma 3: vocab_size), or what the
            # class counts (Nemotron-H: num_hidden_layers).
            value = self.default(keys)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise _refused(f"config.json gives no usable '{keys[0]}' (found {value!r})")
        return value

    def default(self, keys: tuple[str, ...]) -> Any:  # noqa: ANN401 - a JSON value
        if self._completed is None:
            self._completed = _completed(self._whole)
        values = (getattr(self._completed, key, None) for key in keys)
        return next((value for value in values if value is not None), None)


def _completed(whole: Mapping[str, Any]) -> object:
    """Return the text config as transformers completes it; nothing is in it if the type is unknown."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    model_type = whole.get("model_type")
    if model_type not in CONFIG_MAPPING:
        return object()
    try:
        config = AutoConfig.for_model(**whole)
    except (StrictDataclassError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise _refused(f"config.json is not a valid config of '{model_type}': {error}") from error
    text: object = config.get_text_config()
    return text


def _dtype(asked: str, values: _Values) -> Dtype:
    said = asked if asked != "auto" else values.find(("dtype", "torch_dtype")) or "float32"
    name = str(said).removeprefix("torch.")
    for dtype in get_args(Dtype):
        if name == dtype:
            known: Dtype = dtype
            return known
    raise OptionRefused(
        f"the model's dtype is {name!r}; states can be stored as {', '.join(get_args(Dtype))}",
        field="dtype",
        cure="name one of them in 'dtype'",
    )


def _max_model_len(values: _Values) -> int:
    """Derive the longest sequence as vLLM does, so that no planned sample is too long for it."""
    declared = values.find(("model_max_length",))
    lengths = [length for key in LENGTH_KEYS if (length := values.find((key,))) is not None]
    longest = declared if declared is not None else min(lengths, default=None)
    if longest is None:
        longest = values.default(LENGTH_KEYS) or DEFAULT_LENGTH
    scalings = list(_rope_scalings(values.find(("rope_parameters", "rope_scaling"))))
    if SCALED_LENGTH_MODELS in str(values.find(("model_type",))):
        return int(longest)
    factor = 1.0
    for scaling in scalings:
        kind = scaling.get("rope_type", scaling.get("type"))
        if kind == "longrope" and (original := values.find(("original_max_position_embeddings",))):
            # Beyond this length the engine switches to other rope factors, for short samples too.
            longest = min(longest, original)
        if kind not in LENGTH_INCLUDES_SCALING:
            factor = scaling.get("factor") or factor
    return int(longest * factor)


def _rope_scalings(parameters: object) -> Iterator[Mapping[str, Any]]:
    """Yield the one rope description, or one a kind of attention layer where the config nests them."""
    if isinstance(parameters, dict):
        nested = [value for value in parameters.values() if isinstance(value, dict)]
        yield from nested or [parameters]
