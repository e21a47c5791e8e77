"""The engines by the name that `benchmarks.catalog` calls them by. Imports torch and vLLM."""

from collections.abc import Callable

from benchmarks.rows.contract import Engine, Site
from benchmarks.rows.disk import DiskEngine
from benchmarks.rows.example import ExampleEngine, LockedEngine
from benchmarks.rows.plain import CaptureEngine, PlainEngine
from benchmarks.rows.quarry import QuarryEngine, SlowDiskEngine

ENGINES: dict[str, Callable[[Site], Engine]] = {
    "plain": PlainEngine,
    "disk": DiskEngine,
    "capture": CaptureEngine,
    "quarry": QuarryEngine,
    "quarry-slow": SlowDiskEngine,
    "example": ExampleEngine,
    "locked": LockedEngine,
}
