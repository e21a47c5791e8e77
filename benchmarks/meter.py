"""Measures a process tree from outside: CPU seconds used, and the most memory held at once."""

import threading
from types import TracebackType
from typing import Self

import psutil

SAMPLE_EVERY_S = 0.1


def tree(pid: int) -> list[psutil.Process]:
    """Return the process and all its descendants."""
    root = psutil.Process(pid)
    return [root, *root.children(recursive=True)]


class TreeMeter:
    """Measures from entry to exit. The tree is taken at entry: engines start no process while they run."""

    cpu_s: float = 0.0
    """User and system seconds of all processes together."""
    peak_rss_bytes: int = 0
    """The largest sum of resident sizes that was sampled; a page that two processes share counts twice."""

    def __init__(self, pid: int) -> None:
        """Measure the tree below `pid`."""
        self._tree = tree(pid)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="meter", daemon=True)

    def __enter__(self) -> Self:
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
