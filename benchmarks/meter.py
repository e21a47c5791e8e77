"""Measures a process tree from outside: CPU seconds, who used them, and the most memory held at once.

A thread is told apart by its process's title, which vLLM sets, and by its own name, which our writers set.
"""

import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil  # type: ignore[import-untyped]

SAMPLE_EVERY_S = 0.1

WORKER, WRITERS, CORE, FRONT = "the engine's worker", "Quarry's writers", "the engine's core", "the front end"
STAGES = (WORKER, WRITERS, CORE, FRONT)
"""In the worker are the model, the gather, and whatever threads another connector has there; in the front end
whatever asks the engine, and Quarry's proof."""

Used = Mapping[tuple[str, int], float]
"""CPU seconds by stage and thread."""


def tree(pid: int) -> list[psutil.Process]:
    """Return the process and all its descendants."""
    root = psutil.Process(pid)
    return [root, *root.children(recursive=True)]


def stage_of(process: str, thread: str) -> str:
    """Return the stage of a thread by its name and that of its process."""
    if thread.startswith("quarry-writer"):
        return WRITERS
    if process.startswith("VLLM::Worker"):
        return WORKER
    return CORE if process.startswith("VLLM::Engine") else FRONT


def used(processes: Iterable[psutil.Process]) -> Used:
    """Return what every thread of a tree has used since it began."""
    return {
        (stage_of(process.name(), _name(process.pid, thread.id)), thread.id): thread.user_time
        + thread.system_time
        for process in processes
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


class TreeMeter:
    """Measures from entry to exit. The tree is taken at entry: engines start no process while they run."""

    cpu_s: float = 0.0
    """User and system seconds of all processes together."""
    peak_rss_bytes: int = 0
    """The largest sum of resident sizes that was sampled; a page that two processes share counts twice."""

    stages: dict[str, float]
    """CPU seconds by who used them; what a thread used that has ended is not in it."""

    def __init__(self, pid: int) -> None:
        """Measure the tree below `pid`."""
        self._tree = tree(pid)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="meter", daemon=True)

    def __enter__(self) -> Self:
        self.stages = {}
        self._before = used(self._tree)
        self.cpu_s = -self._used_s()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        if kind is None:
            self.cpu_s += self._used_s()
            self.stages = between(self._before, used(self._tree))

    def _used_s(self) -> float:
        times = [process.cpu_times() for process in self._tree]
        return float(sum(one.user + one.system for one in times))

    def _sample(self) -> None:
        while True:
            try:
                held = sum(process.memory_info().rss for process in self._tree)
            except psutil.NoSuchProcess:
                return  # the row failed; whoever waits for its answer says so
            self.peak_rss_bytes = max(self.peak_rss_bytes, held)
            if self._stop.wait(SAMPLE_EVERY_S):
                return
