"""The real engine: vLLM's AsyncLLM with the `extract_hidden_states` proposer and our connector.

Imported only where it runs.
"""

import asyncio
import contextlib
import dataclasses
import os
from collections.abc import Mapping
from functools import partial
from typing import Any

from connector.plugin import CAPTURES, FAILURE
from connector.versions import FIRST_RUNNER_V2, parse_version

# Read by vLLM. A service that handles other people's data sends no usage statistics.
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
# Overrides the operator's value: a forked engine would inherit this process's signal handling, so that the
# signal that stops it would stop the worker, and locks that this process's threads held, which would never be
# released.
os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
os.environ[CAPTURES] = "1"

import vllm
from vllm import SamplingParams, envs
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.outputs import RequestOutput
from vllm.sampling_params import RepetitionDetectionParams, RequestOutputKind
from vllm.triton_utils import HAS_TRITON
from vllm.usage.usage_lib import UsageContext
from vllm.utils.network_utils import get_open_zmq_ipc_path
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from schemas.dataset.columns import state_bytes
from schemas.digest import canonical_sha256
from schemas.generate import Generate
from schemas.identity import EngineInfo
from service.capture.engine import (
    SHORT_TMPDIR,
    SOCKET_PATH_BYTES,
    WITNESS_TOKENS,
    Answer,
    Ended,
    EngineSpec,
    Prompt,
    PromptRefused,
)
from service.capture.engine_options import (
    STEP_STATE_BYTES,
    check_engine_options,
    check_generate,
    check_started,
    recorded_plugins,
    recorded_variables,
)
from service.capture.link import EngineLink
from service.capture.model_route import find_route
from service.capture.vllm_start import VllmStart
from service.environment import PREFIX
from service.errors import EngineDied, EngineRefused
from service.settings import Settings

USAGE = UsageContext.LLM_CLASS
"""AsyncLLM's own context has no batch sizes per device, only the library's small defaults."""
STOP_TIMEOUT_S = 30.0
"""How long the engine's processes may take to end; every unit has a receipt or was abandoned by then."""

CANNOT = (AttributeError, LookupError, TypeError, AssertionError, ImportError)
"""What vLLM's code raises of a configuration that this version cannot handle."""

FINISHED_WELL: Mapping[str | None, Ended] = {"stop": "end", "length": "length", "repetition": "repeats"}
"""vLLM's finish reasons; a `stop` string also has the first one."""


class VllmEngine:
    """AsyncLLM in this process's event loop; its core and workers are processes of their own."""

    info: EngineInfo
    connector_module = "connector.hidden_states"
    """Where vLLM finds `HiddenStatesConnector`; subclasses use another module to measure or to inject
    faults.
    """

    def __init__(self) -> None:
        self._llm: AsyncLLM | None = None
        self._start: VllmStart[AsyncLLM] | None = None
        self._link: EngineLink | None = None

    @property
    def alive(self) -> bool:
        """Return whether the front end is healthy; it watches the core's process."""
        return self._llm is not None and not self._llm.errored

    async def start(self, spec: EngineSpec, settings: Settings, link: EngineLink) -> None:
        """Start vLLM; this takes seconds for a tiny model on a CPU, minutes for a large one."""
        known = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
        check_engine_options(settings.engine_options, known)
        plugins = recorded_plugins(envs.VLLM_PLUGINS)
        if len(os.fsencode(get_open_zmq_ipc_path().removeprefix("ipc://"))) > SOCKET_PATH_BYTES:
            detail = f"the path of vLLM's folder is too long for its sockets: {envs.VLLM_RPC_BASE_PATH}"
            raise EngineDied(detail, cure=SHORT_TMPDIR)
        # Read only by the CPU build, in the core's process; an operator's own value is kept.
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(settings.cpu_kv_cache_gib))
        os.environ[FAILURE] = str(link.failure_path)
        self._link = link
        arguments = engine_arguments(spec, settings, link, self.connector_module)
        try:
            _check_batch_invariance()
            # The core connects to our link while it starts, so the loop must stay free.
            route = await asyncio.to_thread(find_route, arguments)
            self._start = VllmStart(partial(build_llm, arguments | dict(route.overrides)))
            async with asyncio.timeout(settings.engine_start_timeout_s):
                llm = await self._start.built()
            self._llm = llm
        except ValueError as error:
            # vLLM rejects the configuration: it would do so again.
            what, cure = f"vLLM refuses {spec.weights.name}: {error}", None
            raise await self._refused(what, cure, spec, settings) from error
        except CANNOT as error:
            # This version's code cannot handle the configuration: another start would fail, too.
            what = f"vLLM refuses {spec.weights.name}: {type(error).__name__}: {error}"
            cure = "take another model: docs/architectures.md says which architectures were run"
            raise await self._refused(what, cure, spec, settings) from error
        except TimeoutError as error:
            raise EngineDied(
                f"vLLM did not start for {spec.weights.name} within {settings.engine_start_timeout_s:.0f} s",
                field="model",
                cure="see the engine's log, or raise QUARRY_ENGINE_START_TIMEOUT_S",
            ) from error
        except (RuntimeError, OSError) as error:
            if link.refusal is not None:
                raise EngineRefused(link.refusal, field="model") from error
            raise EngineDied(
                f"vLLM did not start for {spec.weights.name}: {link.failure() or error}",
                field="model",
                cure=(
                    "where memory is short, free the GPU, set QUARRY_TENSOR_PARALLEL_SIZE or lower the "
                    "job's 'max_tokens', and for the host pool QUARRY_POOL_BYTES; the engine's log has the "
                    "whole error"
                ),
            ) from error
        hellos = await link.hello(settings.engine_start_timeout_s)
        config = llm.vllm_config
        self.info = EngineInfo(
            name="vllm",
            version=hellos[0].engine_version,
            device=hellos[0].device,
            options={
                "async_scheduling": bool(config.scheduler_config.async_scheduling),
                "block_size": hellos[0].cache_shape[2],
                "chunked_prefill": bool(config.scheduler_config.enable_chunked_prefill),
                "enforce_eager": bool(config.model_config.enforce_eager),
                "kv_cache_dtype": config.cache_config.cache_dtype,
                "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
                "model_class": route.model_class,
                "model_runner": "V2" if getattr(config, "use_v2_model_runner", False) else "V1",
                # Any option may change the rounding. A digest, since an option may hold a token.
                "operator_options_sha256": canonical_sha256(settings.engine_options),
                "prefix_caching": bool(config.cache_config.enable_prefix_caching),
                "quantization": config.model_config.quantization,
                "route": route.kind,
                "tensor_parallel_size": config.parallel_config.tensor_parallel_size,
                **plugins,
                **recorded_variables(os.environ),
            },
        )
        check_started(
            self.info,
            decode=spec.decode,
            max_model_len=spec.max_model_len,
            max_num_scheduled_tokens=config.scheduler_config.max_num_scheduled_tokens,
        )

    async def _refused(
        self, what: str, cure: str | None, spec: EngineSpec, settings: Settings
    ) -> EngineRefused:
        """Return the error for what vLLM refuses: of the settings without which it takes the model, if any.

        Such are a mistaken option, and a GPU too few, as on a machine that has lost one. One alone comes
        first, since the model may need the other. What vLLM takes as a configuration and refuses later is of
        the model, such as a broken tokenizer.
        """
        plain = {"engine_options": {}, "tensor_parallel_size": 1}
        changed = [name for name, value in plain.items() if getattr(settings, name) != value]
        if changed and not await self._takes(spec, settings):
            for names in dict.fromkeys((*((name,) for name in changed), tuple(changed))):
                without = settings.model_copy(update={name: plain[name] for name in names})
                if await self._takes(spec, without):
                    fields = [f"{PREFIX}{name.upper()}" for name in names]
                    cure = f"change {' or '.join(fields)}: without, vLLM takes the model"
                    return EngineRefused(what, field=fields[0], cure=cure)
        return EngineRefused(what, field="model", cure=cure)

    async def _takes(self, spec: EngineSpec, settings: Settings) -> bool:
        assert self._link is not None, "start() comes first"  # noqa: S101
        return await asyncio.to_thread(
            _takes, engine_arguments(spec, settings, self._link, self.connector_module)
        )

    async def run(self, prompt: Prompt) -> Answer:
        """Submit one request and wait for its last output."""
        assert self._llm is not None, "start() comes first"  # noqa: S101
        assert self._link is not None, "start() comes first"  # noqa: S101
        check_generate(prompt.generate, self.info)
        last: RequestOutput | None = None
        stream = self._llm.generate(
            {"prompt_token_ids": list(prompt.token_ids)}, sampling_parameters(prompt), prompt.request_id
        )
        try:
            async with contextlib.aclosing(stream):
                async for output in stream:
                    last = output
        except EngineDeadError as error:
            why = self._link.failure() or "without an error of its own"
            raise EngineDied(f"the engine's core died: {why}") from error
        except (VLLMValidationError, ValueError) as error:
            raise PromptRefused(str(error)) from error
        except EngineGenerateError as error:
            why = self._link.failure() or repr(error.__cause__ or error)  # its own text is empty
            raise EngineDied(f"request {prompt.request_id} failed in the engine: {why}") from error
        if last is None or not last.outputs or last.outputs[0].finish_reason not in FINISHED_WELL:
            reason = last.outputs[0].finish_reason if last is not None and last.outputs else None
            raise EngineDied(f"request {prompt.request_id} ended as {reason} in the engine")
        return _answer(last, witness=prompt.witness)

    async def stop(self) -> None:
        """End the engine's processes, including those of a cancelled start."""
        if self._start is not None:
            start, self._start = self._start, None
            self._llm = await start.end()
        if self._llm is not None:
            llm, self._llm = self._llm, None
            if llm.output_handler is not None:
                # It would report the core's exit as a crash.
                llm.output_handler.cancel()
            await asyncio.to_thread(llm.shutdown, STOP_TIMEOUT_S)


def _check_batch_invariance() -> None:
    """Raise EngineRefused for batch invariance under vLLM's model runner V2, which a GPU has by default."""
    takes_v1 = parse_version(vllm.__version__) < FIRST_RUNNER_V2 or envs.VLLM_USE_V2_MODEL_RUNNER is False
    if HAS_TRITON and not takes_v1 and envs.VLLM_BATCH_INVARIANT:
        raise EngineRefused(
            "VLLM_BATCH_INVARIANT is set: vLLM's model runner V2 starts no engine that extracts then, since "
            "the layer that stores the states does not say that it is batch invariant",
            field="VLLM_BATCH_INVARIANT",
            cure="leave it unset",
        )


def _takes(arguments: dict[str, Any]) -> bool:
    """Return whether vLLM takes a configuration, before it starts any process."""
    try:
        more = find_route(arguments).overrides
        AsyncEngineArgs(**(arguments | dict(more))).create_engine_config(USAGE)
    except (EngineRefused, ValueError, RuntimeError, OSError, *CANNOT):
        return False
    return True


def build_llm(arguments: dict[str, Any]) -> AsyncLLM:
    """Start vLLM with keyword arguments of AsyncEngineArgs; blocks until its processes are ready."""
    return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments), usage_context=USAGE)


def engine_arguments(
    spec: EngineSpec,
    settings: Settings,
    link: EngineLink,
    connector_module: str = VllmEngine.connector_module,
) -> dict[str, Any]:
    """Return the keyword arguments of AsyncEngineArgs for a spec.

    The operator's `engine_options` override defaults, but never the capture's own options.
    """
    step_tokens = STEP_STATE_BYTES // state_bytes(1, len(spec.layer_ids), spec.hidden_size, spec.dtype)
    defaults, _ = AsyncEngineArgs.get_batch_defaults(settings.tensor_parallel_size)
    # vLLM doubles its default in this mode.
    is_doubled = settings.engine_options.get("performance_mode") == "throughput"
    default_tokens = defaults[USAGE] * (2 if is_doubled else 1)
    arguments: dict[str, Any] = {
        "model": str(spec.weights),
        "dtype": spec.dtype,
        "max_model_len": spec.max_model_len,
        # Stop strings need the detokenizer; prefill does not.
        "skip_tokenizer_init": not spec.decode,
        # Prompts are token ids, so a multimodal model need not reserve space for images.
        "language_model_only": True,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "disable_log_stats": settings.worker_metrics_port is None,
        "enable_log_requests": False,
        **({"max_num_batched_tokens": step_tokens} if step_tokens < default_tokens else {}),
        **settings.engine_options,
        "speculative_config": {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(spec.layer_ids)}},
        },
        "kv_transfer_config": {
            "kv_connector": "HiddenStatesConnector",
            "kv_connector_module_path": connector_module,
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {
                "work_root": str(settings.work_root.resolve()),
                "socket_path": str(link.path),
                "pool_bytes": settings.pool_bytes,
                "writer_threads": settings.writers(),
            },
        },
    }
    if settings.gpu_memory_utilization is not None:
        arguments["gpu_memory_utilization"] = settings.gpu_memory_utilization
    if spec.decode:
        # With asynchronous scheduling and this method, the V1 runner decodes wrong tokens after a repeated
        # one. By its code the V2 runner does not, but that is untested: an operator may opt in, and
        # `check_started` checks.
        arguments.setdefault("async_scheduling", False)
    return arguments


def sampling_parameters(prompt: Prompt) -> SamplingParams:
    """Return the request's sampling parameters: for one greedy token, or for the requested answer."""
    extra = {"kv_transfer_params": prompt.ref.params()} if prompt.ref is not None else None
    common: dict[str, Any] = {
        "extra_args": extra,
        "logprobs": WITNESS_TOKENS if prompt.witness else None,
        "output_kind": RequestOutputKind.FINAL_ONLY,
        "skip_reading_prefix_cache": not prompt.reads_cache,
    }
    generate = prompt.generate
    if generate is None:
        return SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, **common)
    return SamplingParams(
        max_tokens=generate.max_tokens,
        temperature=generate.temperature,
        top_p=generate.top_p,
        top_k=generate.top_k,
        seed=generate.seed,
        stop=list(generate.stop) or None,
        repetition_detection=_repetition(generate),
        detokenize=bool(generate.stop),
        **common,
    )


def _repetition(generate: Generate) -> RepetitionDetectionParams | None:
    asked = generate.repeats
    return asked and RepetitionDetectionParams(max_pattern_size=asked.pattern, min_count=asked.times)


def _answer(output: RequestOutput, *, witness: bool) -> Answer:
    """Return the sampled tokens, and the last position's most likely tokens with their log-probabilities."""
    completion = output.outputs[0]
    token_ids = tuple(completion.token_ids)
    ended = FINISHED_WELL[completion.finish_reason]
    if ended == "end" and isinstance(completion.stop_reason, str):
        ended = "stop"
    if not witness or not completion.logprobs:
        return Answer(token_ids, (), ended)
    likely = sorted(completion.logprobs[-1].items(), key=lambda item: -item[1].logprob)
    # vLLM adds the sampled token even if it is less likely.
    witnessed = tuple((int(token), float(at.logprob)) for token, at in likely[:WITNESS_TOKENS])
    return Answer(token_ids, witnessed, ended)
