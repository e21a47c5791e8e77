"""Reads the few numbers of a target that planning needs from `config.json`, for any model type."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

from pydantic import BaseModel, Field, TypeAdapter, ValidationError
from pydantic_core import from_json

from schemas.request import Dtype
from service.errors import OptionRefused, UnknownModel

TEXT_CONFIGS = ("text_config", "llm_config", "language_config", "thinker_config", "decoder")
"""Where multimodal configs have the language model's part."""
NUM_LAYERS_KEYS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
HIDDEN_SIZE_KEYS = ("hidden_size", "n_embd", "d_model", "dim")
VOCAB_SIZE_KEYS = ("vocab_size", "padded_vocab_size")
LENGTH_KEYS = (
    *("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"),
    *("max_sequence_length", "max_seq_length", "seq_len"),
)
DEFAULT_LENGTH = 2048
"""What the engine assumes if a config names no length."""

LENGTH_INCLUDES_SCALING = ("su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling")
"""RoPE types whose `max_position_embeddings` is already the scaled length."""
SCALED_LENGTH_MODELS = "gemma3"
"""Model types with this substring have the scaled length with every RoPE type."""

NAMING_ANOTHER = ("speculators_config", "text_model_id", "audio_model_id", "configuration_files")
"""Keys of a drafter and of Ultravox that name another model, which the engine loads from wherever it is; and
one that lists files by version of transformers, which reads that for its own in place of config.json.
"""

T = TypeVar("T")
NAME = TypeAdapter[str](Annotated[str, Field(strict=True)])
DTYPE = TypeAdapter[Dtype](Dtype)
NAMES = TypeAdapter[tuple[str, ...]](tuple[str, ...])
Count = Annotated[int, Field(strict=True, ge=1, lt=2**31)]
COUNT = TypeAdapter[int](Count)
LENGTH = TypeAdapter[float](Annotated[float, Field(strict=True, ge=2, lt=2**31, allow_inf_nan=False)])
"""In tokens, prompt and answer together; some configs have it as a float."""


class _Rope(BaseModel):
    """The RoPE scaling of one kind of attention layer."""

    rope_type: str | None = None
    type: str | None = None
    factor: float | None = Field(default=None, strict=True, ge=1, lt=2**31, allow_inf_nan=False)
    original_max_position_embeddings: float | None = Field(default=None, ge=2, lt=2**31, allow_inf_nan=False)


ROPE = TypeAdapter[_Rope](_Rope)
ROPES = TypeAdapter[dict[str, Any]](dict[str, Any])


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The values of `config.json`. `max_model_len` is derived as by the engine: prompt plus answer."""

    architectures: tuple[str, ...]
    num_layers: Count
    hidden_size: Count
    vocab_size: Count
    dtype: Dtype
    max_model_len: int


def read_config(folder: Path, dtype: str) -> ModelConfig:
    """Read `folder`/config.json; `dtype` is the request's: `auto` uses the config's, or float32.

    Raises UnknownModel (field `model`), OptionRefused (field `dtype`).
    """
    whole = config_json(folder)
    if others := [key for key in NAMING_ANOTHER if whole.get(key) is not None]:
        detail = f"config.json names another model or config with '{others[0]}', which the engine would load"
        cure = "give that model, or a folder that holds that config and all weights, without the key"
        raise UnknownModel(detail, field="model", cure=cure)
    text = next((whole[key] for key in TEXT_CONFIGS if isinstance(whole.get(key), dict)), whole)
    values = _Values(whole, text)
    return ModelConfig(
        architectures=_typed(NAMES, whole.get("architectures") or (), "architectures"),
        num_layers=values.number(NUM_LAYERS_KEYS),
        hidden_size=values.number(HIDDEN_SIZE_KEYS),
        vocab_size=values.number(VOCAB_SIZE_KEYS),
        dtype=_dtype(dtype, values),
        max_model_len=_max_model_len(values),
    )


_MAX_CONFIG_BYTES = 2**24


def config_json(folder: Path) -> dict[str, Any]:
    """Return the object in `folder`/config.json. Raises UnknownModel (field `model`)."""
    try:
        with (folder / "config.json").open("rb") as file:
            raw = file.read(_MAX_CONFIG_BYTES + 1)
        if len(raw) > _MAX_CONFIG_BYTES:
            raise _refused(f"config.json has more than {_MAX_CONFIG_BYTES} bytes")
        from_json(raw)  # refuses nesting too deep for other code to traverse
        config = json.loads(raw, object_hook=_special_float)
    except (OSError, ValueError) as error:
        raise _refused(f"config.json cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise _refused("config.json is not an object")
    return config


def _refused(detail: str) -> UnknownModel:
    return UnknownModel(detail, field="model", cure="give a causal language model in the transformers format")


def _special_float(value: dict[str, Any]) -> dict[str, Any] | float:
    """Decode numbers that JSON lacks, which transformers writes as {"__float__": "Infinity"}."""
    special = value.get("__float__") if len(value) == 1 else None
    return float(special) if isinstance(special, str) else value


def _typed(kind: TypeAdapter[T], value: object, key: str) -> T:
    try:
        return kind.validate_python(value)
    except ValidationError as error:
        why = error.errors(include_url=False)[0]["msg"]
        raise _refused(f"config.json gives no usable '{key}' (found {value!r:.100}): {why}") from error


class _Values:
    """Looks keys up in the text config, then in the whole config, then in the defaults of its class."""

    def __init__(self, whole: Mapping[str, Any], text: Mapping[str, Any]) -> None:
        self._given = (text, whole)

    def find(self, keys: tuple[str, ...], kind: TypeAdapter[T]) -> T | None:
        for level in self._given:
            for key in keys:
                if level.get(key) is not None:
                    return _typed(kind, level[key], key)
        return None

    def number(self, keys: tuple[str, ...]) -> int:
        # Published configs omit values that equal the class's default (Gemma 3: vocab_size) or that the class
        # derives (Nemotron-H: num_hidden_layers).
        value = self.find(keys, COUNT) or self.default(keys, COUNT)
        if value is None:
            raise _refused(f"config.json gives no '{keys[0]}'")
        return value

    def default(self, keys: tuple[str, ...], kind: TypeAdapter[T]) -> T | None:
        values = ((key, getattr(self._completed, key, None)) for key in keys)
        return next((_typed(kind, value, key) for key, value in values if value is not None), None)

    @cached_property
    def _completed(self) -> object:
        """The text config as completed by transformers; an empty object if the type is unknown."""
        from huggingface_hub.errors import StrictDataclassError

        whole = self._given[1]
        model_type = _typed(NAME, whole.get("model_type") or "", "model_type")
        from transformers import AutoConfig
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        if model_type not in CONFIG_MAPPING:
            return object()
        try:
            text: object = AutoConfig.for_model(**whole).get_text_config()
        except (
            *(StrictDataclassError, ValueError, TypeError, LookupError, AttributeError),
            *(ArithmeticError, RecursionError),
        ) as error:
            raise _refused(f"config.json is not a valid config of '{model_type}': {error}") from error
        return text


def _dtype(asked: str, values: _Values) -> Dtype:
    named = asked if asked != "auto" else values.find(("dtype", "torch_dtype"), NAME) or "float32"
    try:
        return DTYPE.validate_python(named.removeprefix("torch."))
    except ValidationError as error:
        known = ", ".join(get_args(Dtype))
        detail = f"the model's dtype is {named.removeprefix('torch.')!r}; states can be stored as {known}"
        raise OptionRefused(detail, field="dtype", cure="name one of them in 'dtype'") from error


def _max_model_len(values: _Values) -> int:
    """Derive the maximum length as vLLM does, so that no planned sample is too long for it."""
    declared = values.find(("model_max_length",), LENGTH)
    lengths = [length for key in LENGTH_KEYS if (length := values.find((key,), LENGTH)) is not None]
    longest = declared if declared is not None else min(lengths, default=None)
    if longest is None:
        longest = values.default(LENGTH_KEYS, LENGTH) or DEFAULT_LENGTH
    scalings = _rope_scalings(values)
    if SCALED_LENGTH_MODELS in (values.find(("model_type",), NAME) or ""):
        return int(longest)
    factor = 1.0
    for scaling in scalings:
        kind = scaling.rope_type or scaling.type
        if kind == "longrope":
            # Beyond this length the engine switches to other RoPE factors, also for short samples.
            original = values.find(("original_max_position_embeddings",), LENGTH)
            original = original or scaling.original_max_position_embeddings
            longest = min(longest, original or longest)
        if kind not in LENGTH_INCLUDES_SCALING:
            factor = scaling.factor or factor
    return int(longest * factor)


def _rope_scalings(values: _Values) -> list[_Rope]:
    """Return the RoPE scaling, or one per kind of attention layer if the config nests them."""
    keys = ("rope_parameters", "rope_scaling")
    parameters = values.find(keys, ROPES) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return [_typed(ROPE, one, keys[0]) for one in nested or [parameters]]
