"""vLLM without our connector: plain prefill, the capture alone, and what the example's rows begin with."""

import asyncio
from collections.abc import Mapping
from typing import Any

from vllm.outputs import RequestOutput
from vllm.v1.engine.async_llm import AsyncLLM

from benchmarks.rows.contract import PromptRow, Row, RowFailed, Site, Written, run_bounded
from service.capture.engine import Prompt
from service.capture.link import EngineLink
from service.capture.vllm_engine import build_llm, engine_arguments, sampling_parameters

STOP_TIMEOUT_S = 30.0


class VllmHost:
    """AsyncLLM with Quarry's arguments but for those that a subclass takes away or replaces."""

    left_out: frozenset[str] = frozenset()
    """Names of arguments that are taken away."""
    replaced: Mapping[str, Any] = {}
    """Arguments that are replaced."""
    rows: Mapping[str, Row]
    llm: AsyncLLM

    def __init__(self, site: Site) -> None:
        """Hold what the engine is started for."""
        self.site = site
        self._started = False

    async def start(self) -> None:
        """Start vLLM."""
        link = EngineLink()  # its path is an argument that is replaced or left out
        arguments = engine_arguments(self.site.spec(), self.site.settings(), link)
        await link.close()
        given = {name: value for name, value in arguments.items() if name not in self.left_out}
        self.llm = await asyncio.to_thread(build_llm, {**given, **self.replaced})
        self._started = True

    async def stop(self) -> None:
        """End the engine's processes."""
        if self._started:
            if self.llm.output_handler is not None:
                self.llm.output_handler.cancel()
            await asyncio.to_thread(self.llm.shutdown, STOP_TIMEOUT_S)

    async def run(self, prompt: Prompt, params: Mapping[str, Any] | None = None) -> RequestOutput:
        """Run one request with `params` as its `kv_transfer_params`. Raises RowFailed."""
        sampling = sampling_parameters(prompt)
        if params is not None:
            sampling.extra_args = {"kv_transfer_params": dict(params)}
        last: RequestOutput | None = None
        ids = {"prompt_token_ids": list(prompt.token_ids)}
        async for output in self.llm.generate(ids, sampling, prompt.request_id):
            last = output
        if last is None or last.outputs[0].finish_reason != "length":
            raise RowFailed(f"request {prompt.request_id} did not end well")
        return last


class PrefillRow(PromptRow):
    """Every prompt through the engine. Done when the last one is answered."""

    def __init__(self, name: str, host: VllmHost) -> None:
        """Run on `host`."""
        super().__init__(host.site, name)
        self._host = host

    async def measure(self) -> float:
        """Run every prompt."""
        return await run_bounded(self._host.run, self.prompts, self.site.budget())

    async def clean(self) -> Written:
        """Nothing was written."""
        return Written(0, 0)


class PlainEngine(VllmHost):
    """No speculative method, no connector."""

    left_out = frozenset({"speculative_config", "kv_transfer_config"})

    def __init__(self, site: Site) -> None:
        """Serve plain prefill."""
        super().__init__(site)
        self.rows = {"plain": PrefillRow("plain", self)}


class CaptureEngine(VllmHost):
    """The speculative method that stores the states in the cache, and no connector."""

    left_out = frozenset({"kv_transfer_config"})

    def __init__(self, site: Site) -> None:
        """Serve the capture alone."""
        super().__init__(site)
        self.rows = {"capture": PrefillRow("capture", self)}
