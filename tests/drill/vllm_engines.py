"""vLLM with failures planted into it."""

from dataclasses import replace

from service.capture.engine import EngineSpec
from service.capture.link import EngineLink
from service.capture.vllm_engine import VllmEngine
from service.settings import Settings


class PlantedVllm(VllmEngine):
    connector_module = "tests.support.planted_connector"


class LayerBeforeVllm(PlantedVllm):
    """Captures layer k - 1 under the name of auxiliary layer k."""

    async def start(self, spec: EngineSpec, settings: Settings, link: EngineLink) -> None:
        *auxiliary, last = spec.layer_ids
        await super().start(replace(spec, layer_ids=(*(k - 1 for k in auxiliary), last)), settings, link)
