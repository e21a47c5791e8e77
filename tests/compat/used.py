"""What connector and service use of vLLM and transformers: read from their sources and the tables here."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from connector.plugin.carried import BACKEND, BACKEND_CLASSES, CARRIED, MODELS
from service.capture.engine_options import OURS, RULES

ROOT = Path(__file__).parents[2]
PACKAGES = ("vllm", "transformers")


@dataclass(frozen=True)
class Use:
    """A name of a module, and where it is called, a call that must bind."""

    module: str
    name: str
    call: ast.Call | None = None


_CONFIG, _STEP, _CACHE = "vllm.config", "vllm.v1.core.sched.output", "vllm.v1.kv_cache_interface"
_BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
OBJECTS = {
    "vllm.v1.engine.async_llm:AsyncLLM": "errored output_handler vllm_config generate(p,s,i) shutdown(t)",
    f"{_CONFIG}:VllmConfig": "scheduler_config model_config cache_config parallel_config speculative_config "
    "kv_transfer_config use_v2_model_runner",
    f"{_CONFIG}:SchedulerConfig": "async_scheduling enable_chunked_prefill max_num_batched_tokens",
    f"{_CONFIG}:CacheConfig": "cache_dtype enable_prefix_caching",
    f"{_CONFIG}:ModelConfig": "enforce_eager quantization dtype max_model_len architecture hf_text_config "
    "model_arch_config get_hidden_size() try_get_generation_config()",
    f"{_CONFIG}:ParallelConfig": "tensor_parallel_size pipeline_parallel_size",
    f"{_CONFIG}:SpeculativeConfig": "draft_model_config",
    f"{_CONFIG}:KVTransferConfig": "get_from_extra_config(k,d)",
    f"{_STEP}:SchedulerOutput": "scheduled_new_reqs scheduled_cached_reqs",
    f"{_STEP}:NewRequestData": "block_ids num_computed_tokens",
    f"{_STEP}:CachedRequestData": "req_ids new_block_ids num_computed_tokens resumed_req_ids",
    "vllm.v1.request:Request": "request_id status kv_transfer_params num_computed_tokens all_token_ids",
    "vllm.v1.request:RequestStatus": "FINISHED_STOPPED FINISHED_LENGTH_CAPPED FINISHED_REPETITION",
    "vllm.outputs:RequestOutput": "outputs",
    "vllm.outputs:CompletionOutput": "token_ids logprobs finish_reason",
    f"{_CACHE}:KVCacheConfig": "kv_cache_groups",
    f"{_CACHE}:KVCacheGroupSpec": "layer_names kv_cache_spec",
    f"{_CACHE}:HiddenStateCacheSpec": "block_size",
    f"{_CACHE}:UniformTypeKVCacheSpecs": "kv_cache_specs",
    f"{_BASE}:KVConnectorBase_V1": "_vllm_config _kv_transfer_config has_connector_metadata() "
    "_get_connector_metadata()",
    "vllm.model_executor.models.interfaces:EagleModelMixin": "aux_hidden_state_layers "
    "_maybe_add_hidden_state(a,k,h,r) _set_aux_hidden_state_layers(l)",
    "vllm.engine.arg_utils:AsyncEngineArgs": " ".join({*OURS, *RULES}),
    "transformers.modeling_utils:PreTrainedModel": "_get_dtype_plan(d) _from_config(c) initialize_weights() "
    "all_tied_weights_keys base_model_prefix get_input_embeddings() get_parameter_or_buffer(n)",
    "transformers.configuration_utils:PreTrainedConfig": "get_text_config(decoder=d)",
    "transformers.quantizers.base:HfQuantizer": "validate_environment() quantization_config",
}
"""Attributes and methods, with the arguments that they are called with, of objects that we are given."""

MENTIONED = {
    "transformers.initialization": "_is_hf_initialized",
    "vllm.model_executor.models.extract_hidden_states": "cache_only_layers",
    "vllm.v1.spec_decode.extract_hidden_states": "eagle_aux_hidden_state_layer_ids",
    "vllm.envs": "VLLM_WORKER_MULTIPROC_METHOD",
}
"""Words that a module must hold."""

_V1, _V2 = "vllm.v1.worker", "vllm.v1.worker.gpu"
WATCHED = (
    f"{_BASE}:KVConnectorBase_V1",
    "vllm.v1.spec_decode.extract_hidden_states:ExtractHiddenStatesProposer.propose",
    "vllm.v1.spec_decode.extract_hidden_states:ExtractHiddenStatesProposer.prepare_next_token_ids_padded",
    "vllm.model_executor.models.extract_hidden_states:CacheOnlyAttentionLayer",
    "vllm.model_executor.models.extract_hidden_states:ExtractHiddenStatesModel",
    f"{_CACHE}:HiddenStateCacheSpec",
    f"{_V1}.kv_connector_model_runner_mixin:KVConnectorModelRunnerMixin",
    f"{_V1}.gpu_model_runner:GPUModelRunner.sample_tokens",
    f"{_V1}.gpu_model_runner:GPUModelRunner.propose_draft_token_ids",
    f"{_V2}.kv_connector:ActiveKVConnector",
    f"{_V2}.model_runner:GPUModelRunner.sample_tokens",
    f"{_V2}.spec_decode.extract_hidden_states:ExtractHiddenStatesSpeculator",
    # From 0.33 on, V2 may skip a proposer that has these; ours has none, and so runs in every step.
    "vllm.config.vllm:VllmConfig.num_lookahead_tokens",
    "vllm.v1.core.sched.scheduler:Scheduler._connector_finished",
    "vllm.v1.core.sched.scheduler:Scheduler._update_from_kv_xfer_finished",
    "vllm.engine.arg_utils:EngineArgs.get_batch_defaults",
    "vllm.utils.system_utils:get_mp_context",
    "transformers.core_model_loading:rename_source_key",
    "transformers.core_model_loading:convert_and_load_state_dict_in_model",
    "transformers.conversion_mapping:get_model_conversion_mapping",
    "transformers.modeling_utils:PreTrainedModel._get_dtype_plan",
    "transformers.modeling_utils:PreTrainedModel.initialize_weights",
    "transformers.utils.chat_template_utils:_compile_jinja_template",
)
"""What rows rest on: where its source changed, a person reads it."""


def ours() -> Iterator[ast.Module]:
    """Yield our own modules."""
    for package in ("connector", "service"):
        yield from (ast.parse(path.read_text()) for path in sorted((ROOT / package).rglob("*.py")))


def imported(tree: ast.Module) -> dict[str, tuple[str, str]]:
    """Return what a module of ours imports: (module, name) by the name that it has there."""
    froms = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom))
    return {one.asname or one.name: (str(node.module), one.name) for node in froms for one in node.names}


def uses(modules: list[ast.Module]) -> Iterator[Use]:
    """Yield every name that `modules` import, its attributes, and the calls of either."""
    for tree in modules:
        known = imported(tree)
        wholes = {one.name for node in ast.walk(tree) if isinstance(node, ast.Import) for one in node.names}
        calls = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
        yield from (Use(*place) for place in known.values())
        for node in ast.walk(tree):
            call = calls.get(id(node))
            if isinstance(node, ast.Name) and node.id in known and call is not None:
                yield Use(*known[node.id], call)
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                if node.value.id in known:
                    module, name = known[node.value.id]
                    yield Use(module, f"{name}.{node.attr}", call)
                elif node.value.id in wholes:
                    yield Use(node.value.id, node.attr, call)


def tabled() -> Iterator[Use]:
    """Yield what the tables name, the classes that the plug-in stands for among it."""
    for place, members in OBJECTS.items():
        module, name = place.split(":")
        for member in members.split():
            parsed = ast.parse(member, mode="eval").body
            call = parsed if isinstance(parsed, ast.Call) else None
            yield Use(module, f"{name}.{member.split('(')[0]}", call)
    for about in CARRIED.values():
        yield from (Use(f"{MODELS}.{about.module}", name) for name in (about.model, about.decoder) if name)
    yield from (Use(BACKEND, name) for name in BACKEND_CLASSES)
