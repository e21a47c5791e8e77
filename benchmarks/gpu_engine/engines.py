"""vLLM for the GPU runs, started with the service's own arguments and fed by the service's own link."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.outputs import RequestOutput
from vllm.v1.engine.async_llm import AsyncLLM

from benchmarks.gpu_engine.cases import Shape
from schemas.receipts import Hello, OpenUnit, UnitSealed
from schemas.request import Dtype
from service.capture.budget import InFlight
from service.capture.engine import EngineSpec, Prompt
from service.capture.link import EngineLink
from service.capture.vllm_engine import engine_arguments, sampling_parameters
from service.settings import Settings

STOP_TIMEOUT_S = 30.0

CAPTURE_ARGUMENTS = frozenset({"speculative_config", "kv_transfer_config"})


class RunFailed(RuntimeError):
    """A run that did not do its whole work has no figure."""


def spec_of(weights: Path, shape: Shape, dtype: Dtype, longest: int) -> EngineSpec:
    """Return what an engine is started for; `longest` counts the tokens of a request, answer included."""
    return EngineSpec(
        weights=weights,
        revision="0",
        dtype=dtype,
        layer_ids=shape.layer_ids,
        hidden_size=shape.hidden_size,
        max_model_len=longest + 1,
        decode=False,
    )


class Engine:
    """One AsyncLLM. Its core is a process of its own."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        """Hold `arguments` of AsyncEngineArgs until `start`."""
        self._arguments = arguments
        self._llm: AsyncLLM | None = None

    async def start(self) -> None:
        """Start vLLM; the loop stays free, since the connector says hello meanwhile."""
        self._llm = await asyncio.to_thread(
            AsyncLLM.from_engine_args, AsyncEngineArgs(**dict(self._arguments))
        )

    def facts(self) -> dict[str, object]:
        """Return what vLLM made of its arguments."""
        assert self._llm is not None, "start() comes first"
        config = self._llm.vllm_config
        return {
            "async_scheduling": bool(config.scheduler_config.async_scheduling),
            "runner": "V2" if getattr(config, "use_v2_model_runner", False) else "V1",
            "enforce_eager": bool(config.model_config.enforce_eager),
            "prefix_caching": bool(config.cache_config.enable_prefix_caching),
            "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
            "max_num_seqs": config.scheduler_config.max_num_seqs,
        }

    async def run(self, prompt: Prompt, params: Mapping[str, Any] | None = None) -> RequestOutput:
        """Run one request; `params` stand for the `kv_transfer_params` of its row. Raises RunFailed."""
        assert self._llm is not None, "start() comes first"
        sampling = sampling_parameters(prompt)
        if params is not None:
            sampling.extra_args = {"kv_transfer_params": dict(params)}
        last: RequestOutput | None = None
        async for output in self._llm.generate(
            {"prompt_token_ids": list(prompt.token_ids)}, sampling, prompt.request_id
        ):
            last = output
        if last is None or last.outputs[0].finish_reason != "length":
            raise RunFailed(f"request {prompt.request_id} did not end well")
        return last

    async def run_all(
        self, prompts: Sequence[Prompt], settings: Settings, params: Sequence[Mapping[str, Any]] | None = None
    ) -> list[RequestOutput]:
        """Run `prompts` within the service's bound on what is in the engine; outputs in their order."""
        budget = InFlight(settings.in_flight_tokens, settings.in_flight_requests)

        async def one(index: int, prompt: Prompt) -> RequestOutput:
            async with budget.hold(len(prompt.token_ids)):
                return await self.run(prompt, params[index] if params is not None else None)

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(index, prompt)) for index, prompt in enumerate(prompts)]
        return [task.result() for task in tasks]

    async def stop(self) -> None:
        """End the engine's processes; harmless when it was not started."""
        if self._llm is not None:
            llm, self._llm = self._llm, None
            if llm.output_handler is not None:
                llm.output_handler.cancel()
            await asyncio.to_thread(llm.shutdown, STOP_TIMEOUT_S)


class Capture(Engine):
    """An engine with Quarry's connector."""

    def __init__(self, spec: EngineSpec, settings: Settings, changes: Mapping[str, Any]) -> None:
        """Take the service's arguments for `spec`, with `changes` laid over them."""
        self.settings = settings
        self.link = EngineLink()
        super().__init__(engine_arguments(spec, settings, self.link) | dict(changes))
        self.hello: Hello

    async def start(self) -> None:
        """Start vLLM and wait for the connector's hello."""
        await self.link.listen()
        await super().start()
        (self.hello,) = await self.link.hello(self.settings.engine_start_timeout_s)

    def facts(self) -> dict[str, object]:
        """Add what the connector found."""
        found = self.hello.model_dump(mode="json", exclude={"kind", "rank", "num_ranks"})
        return super().facts() | found

    async def run_unit(
        self, told: OpenUnit, prompts: Sequence[Prompt]
    ) -> tuple[UnitSealed, list[RequestOutput]]:
        """Run a unit whose plan is written; return its receipt and what the engine answered.

        Raises RunFailed unless every row was sealed.
        """
        await self.link.open(told)
        outputs = await self.run_all(prompts, self.settings)
        (receipt,) = await self.link.receipts(told.key)
        if not isinstance(receipt, UnitSealed) or len(receipt.rows) != told.num_rows:
            raise RunFailed(f"unit {told.key.unit} was not written whole: {receipt}")
        return receipt, outputs

    async def stop(self) -> None:
        """End the engine, then the link."""
        await super().stop()
        await self.link.close()


def without_capture(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of the same engine as plain vLLM."""
    return {name: value for name, value in arguments.items() if name not in CAPTURE_ARGUMENTS}
