"""Our engine, with the connector that notes its first states."""

from service.capture.vllm_engine import VllmEngine


class NotedEngine(VllmEngine):
    """Named by QUARRY_ENGINE."""

    connector_module = "benchmarks.startup_connector"
