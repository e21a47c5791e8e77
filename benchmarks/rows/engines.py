"""The engines by the name that `benchmarks.catalog` calls them by. Imports torch and vLLM."""

from collections.abc import Callable

from benchmarks.rows.contract import Engine, Site
from benchmarks.rows.example import ExampleEngine, LockedEngine
from benchmarks.rows.plain import CaptureEngine, PlainEngine, PlainV1Engine
from benchmarks.rows.quarry import QuarryEngine

ENGINES: dict[str, Callable[[Site], Engine]] = {
    "plain": PlainEngine,
    "plain-v1": PlainV1Engine,
    "capture": CaptureEngine,
    "quarry": QuarryEngine,
    "example": ExampleEngine,
    "locked": LockedEngine,
}
