"""Who in an engine's process tree used the cores: its worker, our writers, its core, or the front end.

A thread is told by its process's title, which vLLM sets, and by its own name, which our writers set.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

import psutil  # type: ignore[import-untyped]

WORKER, WRITERS, CORE, FRONT = "the engine's worker", "Quarry's writers", "the engine's core", "the front end"
STAGES = (WORKER, WRITERS, CORE, FRONT)
"""In the worker are the model, the gather, and whatever threads another connector has there; in the front end
whatever asks the engine, and Quarry's proof."""

Used = Mapping[tuple[str, int], float]
"""CPU seconds by stage and thread."""


def stage_of(process: str, thread: str) -> str:
    """Return the stage of a thread by its name and that of its process."""
    if thread.startswith("quarry-writer"):
        return WRITERS
    if process.startswith("VLLM::Worker"):
        return WORKER
    return CORE if process.startswith("VLLM::Engine") else FRONT


def used(tree: Iterable[psutil.Process]) -> Used:
    """Return what every thread of a tree has used since it began."""
    return {
        (stage_of(process.name(), _name(process.pid, thread.id)), thread.id): thread.user_time
        + thread.system_time
        for process in tree
        for thread in process.threads()
    }


def between(before: Used, after: Used) -> dict[str, float]:
    """Return the CPU seconds of every stage; what threads used that have ended meanwhile is left out."""
    seconds: Counter[str] = Counter(dict.fromkeys(STAGES, 0.0))
    for (stage, thread), spent in after.items():
        seconds[stage] += spent - before.get((stage, thread), 0.0)
    return dict(seconds)


def _name(process: int, thread: int) -> str:
    try:
        return Path(f"/proc/{process}/task/{thread}/comm").read_text()
    except FileNotFoundError:
        return ""
