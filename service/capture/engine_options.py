"""Refuses engine options and requests: unknown names, and values that would make rows wrong or lose them.

Options are checked before the engine starts, so that a mistake costs a second instead of a start of minutes.
"""

import difflib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from schemas.generate import Generate
from schemas.identity import EngineInfo
from service.capture.engine import WITNESS_TOKENS
from service.errors import EngineDied, EngineRefused

SETTING = "QUARRY_ENGINE_OPTIONS"
PLUGIN = "quarry"
"""The name of our entry point among vLLM's plug-ins."""

OURS = {
    **dict.fromkeys(
        ("model", "revision", "code_revision", "tokenizer", "tokenizer_revision", "hf_config_path"),
        "name the model in the job",
    ),
    "dtype": "name it in the job",
    "max_model_len": "set the job's 'max_tokens'",
    "hf_token": "set QUARRY_HUB_TOKEN_FILE",
    "skip_tokenizer_init": "leave it out",
    "tensor_parallel_size": "set QUARRY_TENSOR_PARALLEL_SIZE",
    **dict.fromkeys(
        ("speculative_config", "spec_method", "spec_model", "spec_tokens"),
        "leave it out: the engine holds one speculator, and that is the one that extracts",
    ),
    **dict.fromkeys(
        ("kv_transfer_config", "kv_offloading_size"),
        "leave it out: the engine holds one connector, and that is the one that drains",
    ),
    **dict.fromkeys(
        ("hf_overrides", "model_impl", "model_class_overrides"),
        "leave it out: Quarry takes the engine's Transformers backend where the model needs it",
    ),
    "override_generation_config": "leave it out: the job's 'generate' says how answers are drawn",
}
"""Options that Quarry sets itself, and what to do instead."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Why an option must keep one of its `harmless` values, and what to do instead."""

    harmless: Callable[[Any], bool]
    why: str
    cure: str


def _one_of(*values: object) -> Callable[[Any], bool]:
    return lambda value: value in values


_WORKERS = "run one worker for each engine"
RULES = {
    "trust_remote_code": Rule(
        _one_of(False),
        "whoever names a model in a job would run the code of its repository here",
        "leave it out: docs/architectures.md says which models run without",
    ),
    "pipeline_parallel_size": Rule(
        _one_of(1), "the captured layers would lie on different stages", "set QUARRY_TENSOR_PARALLEL_SIZE"
    ),
    **dict.fromkeys(
        ("data_parallel_size", "data_parallel_size_local"),
        Rule(_one_of(None, 1), "the ranks of several engines could not be distinguished", _WORKERS),
    ),
    **dict.fromkeys(
        ("data_parallel_rank", "data_parallel_start_rank"),
        Rule(_one_of(None), "the ranks of several engines could not be distinguished", _WORKERS),
    ),
    **dict.fromkeys(
        ("data_parallel_hybrid_lb", "data_parallel_external_lb", "data_parallel_multi_port_external_lb"),
        Rule(_one_of(False), "the ranks of several engines could not be distinguished", _WORKERS),
    ),
    **dict.fromkeys(
        ("prefill_context_parallel_size", "decode_context_parallel_size"),
        Rule(_one_of(1), "each rank would hold the states of some tokens only", "leave it at 1"),
    ),
    "nnodes": Rule(_one_of(1), "the engine's workers reach Quarry by a socket of this machine", _WORKERS),
    "distributed_executor_backend": Rule(
        _one_of(None, "mp", "uni"),
        "the engine's workers reach Quarry by a socket of this machine",
        "leave it out, or say 'mp'",
    ),
    "enable_dbo": Rule(
        _one_of(False), "the extracting speculator does not split a batch in two", "leave it out"
    ),
    "kv_sharing_fast_prefill": Rule(
        _one_of(False), "the upper layers would skip the prompt, whose states are wanted", "leave it out"
    ),
    "kv_cache_dtype": Rule(
        _one_of("auto"),
        "a cache of another dtype changes what the layers compute, and states are never stored so",
        "leave it out",
    ),
    **dict.fromkeys(
        ("logits_processors", "watermark_config"),
        Rule(_one_of(None), "answers would not be the target's own", "leave it out"),
    ),
    "generation_config": Rule(
        _one_of("auto"), "answers would end at other tokens than the model's own", "leave it out"
    ),
    "enable_lora": Rule(_one_of(False), "no job can name an adapter", "merge it into the model's weights"),
    "runner": Rule(
        _one_of("auto", "generate"),
        "a pooling engine runs no speculator, so nothing is extracted",
        "leave it out",
    ),
    "convert": Rule(
        _one_of("auto", "none"),
        "a converted model has another head than the rows are proven by",
        "leave it out",
    ),
    "logprobs_mode": Rule(
        _one_of("raw_logprobs"), "rows are proven by the engine's raw log-probabilities", "leave it out"
    ),
    "max_logprobs": Rule(
        lambda value: isinstance(value, int) and (value == -1 or value >= WITNESS_TOKENS),
        "rows are proven by the engine's log-probabilities",
        f"say {WITNESS_TOKENS} or more",
    ),
    **dict.fromkeys(
        ("max_num_queued_reqs", "max_num_queued_tokens"),
        Rule(
            _one_of(None),
            "the engine would turn samples away instead of letting them wait",
            "set QUARRY_IN_FLIGHT_REQUESTS and QUARRY_IN_FLIGHT_TOKENS",
        ),
    ),
}
"""Options that have values with which rows are wrong or missing."""

STEP_STATE_BYTES = 2**30
"""Maximum bytes of states in a step: the proposer stacks them in memory that the engine does not
account for.
"""

VARIABLES = (
    "NVIDIA_TF32_OVERRIDE",
    "TORCH_ALLOW_TF32",
    "VLLM_ALLREDUCE_USE_",
    "VLLM_BATCH_INVARIANT",
    "VLLM_BLOCKSCALE_FP8_",
    "VLLM_CPU_INT4_",
    "VLLM_DISABLED_KERNELS",
    "VLLM_FLASHINFER_MOE_",
    "VLLM_FLOAT32_MATMUL_PRECISION",
    "VLLM_HUMMING_",
    "VLLM_KIMI_",
    "VLLM_MARLIN_",
    "VLLM_MLA_",
    "VLLM_MOE_",
    "VLLM_MXFP",
    "VLLM_ROCM_",
    "VLLM_USE_",
)
"""Prefixes of variables that change which stream is captured or how it is rounded. None of them is secret."""


def check_engine_options(options: Mapping[str, Any], known: Collection[str]) -> None:
    """Raise EngineRefused for the first option that cannot be honoured, with its name and what to do.

    Args:
        options: the operator's options, by the engine's names.
        known: every name that the installed engine accepts.
    """
    for name, value in options.items():
        if name in OURS:
            raise _refused(name, f"{name!r} is set by Quarry itself", OURS[name])
        if name.startswith("_") or name not in known:
            near = difflib.get_close_matches(name, known, n=3)
            cure = f"did you mean {', '.join(near)}?" if near else "see vLLM's EngineArgs for the names"
            raise _refused(name, f"the engine has no option {name!r}", cure)
        if name in RULES and not RULES[name].harmless(value):
            rule = RULES[name]
            raise _refused(name, f"{name!r} cannot be {value!r}: {rule.why}", rule.cure)


def recorded_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a dataset's provenance records along with the engine's options."""
    return {name: value for name, value in sorted(environment.items()) if name.startswith(VARIABLES)}


def recorded_plugins(allowed: Collection[str] | None) -> dict[str, str]:
    """Return the others' plug-ins that vLLM loads into its engine, where they may replace any of its code.

    Args:
        allowed: the names in VLLM_PLUGINS; None for all that are installed.

    Raises EngineDied if a package brings logits processors: vLLM's model runner V2 applies them to every
    request, whatever VLLM_PLUGINS says.
    """
    for plugin in entry_points(group="vllm.logits_processors"):
        raise EngineDied(
            f"{_package(plugin)} brings a logits processor: answers would not be the target's own",
            cure="uninstall it where the worker runs",
        )
    loaded = {
        _package(plugin)
        for plugin in entry_points(group="vllm.general_plugins")
        # vLLM brings some itself, which find adapters.
        if plugin.name != PLUGIN and not plugin.value.startswith("vllm.")
        if allowed is None or plugin.name in allowed
    }
    return {"plugins": ", ".join(sorted(loaded))} if loaded else {}


def check_started(
    engine: EngineInfo, *, decode: bool, max_model_len: int, max_num_scheduled_tokens: int | None
) -> None:
    """Raise EngineRefused if the engine chose settings that make rows wrong or a prompt wait forever."""
    bounds = {
        "max_num_batched_tokens": engine.options["max_num_batched_tokens"],
        # vLLM compares the longest prompt with the other bound alone.
        "max_num_scheduled_tokens": max_num_scheduled_tokens,
    }
    for name, bound in bounds.items():
        if not engine.options["chunked_prefill"] and isinstance(bound, int) and bound < max_model_len:
            raise _refused(
                name,
                f"this engine takes a prompt in one step alone, and a step has room for {bound} of the job's "
                f"{max_model_len} tokens: a longer prompt would wait forever",
                f"say {max_model_len} or more, or lower the job's 'max_tokens'",
            )
    if decode and engine.options["async_scheduling"] and engine.options["model_runner"] == "V1":
        raise _refused(
            "async_scheduling",
            "'async_scheduling' is on: so model runner V1 takes wrong tokens after a repeated one",
            "leave it out: it is off for answers then",
        )


def check_generate(generate: Generate | None, engine: EngineInfo) -> None:
    """Raise EngineRefused if this engine cannot sample answers as requested."""
    if generate is not None and generate.temperature > 0 and engine.device == "cpu":
        raise EngineRefused(
            "vLLM's CPU build draws with a temperature, top_p and top_k read from memory that was never set",
            field="generate.temperature",
            cure="ask for greedy answers (temperature 0), or capture on a GPU",
        )


def _refused(name: str, detail: str, cure: str) -> EngineRefused:
    return EngineRefused(f"{SETTING}: {detail}", field=f"{SETTING}.{name}", cure=cure)


def _package(plugin: EntryPoint) -> str:
    return f"{plugin.dist.name} {plugin.dist.version}" if plugin.dist else plugin.value
