"""Which class computes a model's states: decided before the engine starts, and recorded in the manifest.

The order of preference: the engine's own class, if it can return states; ours (`connector.plugin`), which
uses the engine's kernels; the engine's Transformers backend. A model that none of them can run is refused.

A child process inspects the classes (`service.capture.model_class`). Imports vllm: import it lazily.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import vllm
from vllm import envs
from vllm.config.cache import CacheDType
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.model_executor.models import ModelRegistry

from connector.plugin import CLASSES
from connector.plugin.carried import BACKEND, CARRIED, MODELS
from connector.versions import FIRST_TRIMMED, parse_version
from service.capture.engine_options import PLUGIN
from service.capture.model_class import ask_model_class
from service.errors import EngineRefused

RouteKind = Literal["native", "plugin", "transformers"]

INCOMPLETE = frozenset({"DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM"})
"""On CUDA, vLLM 0.32 has a class of its own for these: it returns no states behind the last layer, and with
tensor parallelism those of the others before they are summed over the ranks.
"""

WINDOWS = ("sliding_window", "sliding_window_size", "interleaved_sliding_window", "attention_chunk_size")
"""How configs name the windows of layers; the second is of MiMo-V2, the third of openPangu and PLaMo 3."""


@dataclass(frozen=True, slots=True)
class ModelRoute:
    """The class that will run, its kind, and the engine arguments that it needs."""

    kind: RouteKind
    model_class: str
    overrides: Mapping[str, Any] = field(default_factory=dict)


def find_route(arguments: Mapping[str, Any]) -> ModelRoute:
    """Return the route of the model for an engine that is to be started with these arguments.

    Reads the model's config but no weights. Raises EngineRefused (`model`, `dtype`, an engine option), and
    ValueError as the engine would.
    """
    config = AsyncEngineArgs(**arguments).create_model_config()
    if config.architecture in INCOMPLETE:
        raise EngineRefused(
            f"on a GPU, vLLM's own class for {config.architecture} returns incomplete hidden states; on a "
            "CPU vLLM does not run it",
            field="model",
            cure="take another model: docs/architectures.md says which architectures were run",
        )
    route = registered_route(config.architecture) or _backend_route(config)
    if route is None:
        what = f"no class for {config.architecture} can return hidden states: neither the engine's own, nor "
        what += "ours, nor its Transformers backend"
        field, cure = "model", "take another model: docs/architectures.md says which architectures were run"
        if config.architecture in CARRIED and PLUGIN not in (envs.VLLM_PLUGINS or [PLUGIN]):
            field = "VLLM_PLUGINS"
            cure = f"name {PLUGIN!r} in {field} too: the engine may not load our classes"
        raise EngineRefused(what, field=field, cure=cure)
    more = {**_prefix_cache(config, arguments), **_cache_dtype(config), **_as_published(config)}
    return replace(route, overrides={**route.overrides, **more})


def _as_published(config: Any) -> Mapping[str, Any]:  # noqa: ANN401 - as below
    """Make the engine follow the config whatever the length of a job's longest sample.

    vLLM omits Llama 4's attention temperature if `max_model_len` is at most 32768, and a job's
    `max_model_len` follows from its samples: the states would differ from those of the model served at full
    length.
    """
    wanted = getattr(config.hf_text_config, "attn_temperature_tuning", None)
    if not wanted or "attn_temperature_tuning" in config.try_get_generation_config():
        return {}
    return {"override_generation_config": {"attn_temperature_tuning": True}}


def _prefix_cache(config: Any, arguments: Mapping[str, Any]) -> Mapping[str, Any]:  # noqa: ANN401 - as below
    """Turn the prefix cache off for a recurrent model, and for one with windows in an older vLLM.

    vLLM copies a block that is hit in part by the view of one layer of its page. Beside a cache of states
    such hits are on, and the page may hold more of another layer's keys than that view. Its CPU build has no
    kernel for the copy at all. For windows see `FIRST_TRIMMED`. Raises EngineRefused if the operator asked
    for the cache.
    """
    text = config.hf_text_config
    if config.is_hybrid or config.is_attention_free:
        why = "is recurrent: with hidden states, vLLM may copy a cached block in part"
    elif parse_version(vllm.__version__) < FIRST_TRIMMED and any(getattr(text, key, None) for key in WINDOWS):
        why = f"has windows: vLLM {vllm.__version__} may give a request blocks that others hold, as its own"
    else:
        return {}
    if arguments.get("enable_prefix_caching"):
        raise EngineRefused(
            f"{config.architecture} {why}",
            field="QUARRY_ENGINE_OPTIONS.enable_prefix_caching",
            cure="leave it out",
        )
    return {"enable_prefix_caching": False}


def _cache_dtype(config: Any) -> Mapping[str, Any]:  # noqa: ANN401 - as below
    """Keep keys and values in the model's dtype, also where its checkpoint asks for fewer bits.

    Those would change what the layers compute, as the operator's option would. Checkpoints of ModelOpt and of
    llm-compressor say so in these keys; a model that also sees may say so for its text alone. Raises
    EngineRefused (`dtype`) if vLLM cannot be told to.
    """
    scheme = config.model_arch_config.quantization_config or {}
    inner = scheme.get("quantization")
    parts = (scheme, inner) if isinstance(inner, dict) else (scheme,)
    if not any(part.get(key) for part in parts for key in ("kv_cache_scheme", "kv_cache_quant_algo")):
        return {}
    dtype = str(config.dtype).removeprefix("torch.")
    if dtype not in get_args(CacheDType):
        raise EngineRefused(
            f"the checkpoint asks for keys and values of fewer bits, and vLLM cannot be told to keep {dtype}",
            field="dtype",
            cure="name bfloat16 or float16 as the job's 'dtype'",
        )
    return {"kv_cache_dtype": dtype}


def registered_route(architecture: str) -> ModelRoute | None:
    """Return the route for the class in the engine's registry, or None if that cannot return states.

    A class that cannot be loaded here is left to the engine, which refuses it.
    """
    known = ModelRegistry.models.get(architecture)
    module = getattr(known, "module_name", None)
    if module is None:
        # Another plug-in registered a class object, or the engine rewrites the name.
        return ModelRoute("native", getattr(getattr(known, "model_cls", None), "__name__", architecture))
    name = known.class_name
    if module == CLASSES:
        return _carried_route(name)
    model_class = ask_model_class(module, name)
    if model_class is not None and not model_class.returns_states:
        return None
    return ModelRoute("transformers" if module == BACKEND else "native", name)


def _carried_route(name: str) -> ModelRoute | None:
    if name not in CARRIED:
        return ModelRoute("transformers", name)
    carried = CARRIED[name]
    model_class = ask_model_class(f"{MODELS}.{carried.module}", carried.model, carried.decoder)
    if model_class is not None and model_class.returns_states:
        return ModelRoute("native", carried.model)
    if model_class is not None and not model_class.has_decoder:
        return None
    return ModelRoute("plugin", carried.model)


def _backend_route(config: Any) -> ModelRoute | None:  # noqa: ANN401 - the engine's ModelConfig
    """Return the route for the engine's Transformers backend, or None if that cannot run the model."""
    from transformers import MODEL_MAPPING

    if type(config.hf_config) not in MODEL_MAPPING:
        return None
    if not MODEL_MAPPING[type(config.hf_config)].is_backend_compatible():
        return None
    name: str = config._get_transformers_backend_cls()
    if registered_route(name) is None:
        return None
    return ModelRoute("transformers", name, {"hf_overrides": {"architectures": [name]}})
