"""Our engine with marks: imported by the job's worker where the program would import its own."""

from benchmarks.startup_marks import mark, mark_birth, marked

mark_birth("the job's worker process")
mark("vLLM's import begins")

from service.capture import vllm_engine  # noqa: E402 - the mark comes first
from service.capture.engine import Answer, EngineSpec, Prompt  # noqa: E402
from service.capture.link import EngineLink  # noqa: E402
from service.settings import Settings  # noqa: E402

mark("vLLM is imported")


class MarkedEngine(vllm_engine.VllmEngine):
    """vLLM with the connector that marks its first row."""

    connector_module = "benchmarks.startup_connector"

    async def start(self, spec: EngineSpec, settings: Settings, link: EngineLink) -> None:
        """Start, with marks around it and within."""
        mark("the engine is asked for")
        vllm_engine.find_route = marked("the route is found", vllm_engine.find_route)
        llm = vllm_engine.AsyncLLM
        llm.__init__ = marked("the engine's config is made", llm.__init__, before=True)  # type: ignore[method-assign]
        await super().start(spec, settings, link)
        mark("the engine is ready")

    async def run(self, prompt: Prompt) -> Answer:
        """Run, with a mark before the first request and before the first that is no canary's."""
        if self._fresh:
            mark("the first request is sent")
            self._fresh = False
        if self._unproven and not prompt.request_id.startswith("canary-"):
            mark("the canary has passed")
            self._unproven = False
        return await super().run(prompt)

    _fresh = _unproven = True
