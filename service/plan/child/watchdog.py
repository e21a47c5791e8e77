"""Whether a child keeps within its limits: CPU time and silence over one row, and resident memory."""

import math
import os
import resource
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from service.plan.child.progress import Progress

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = resource.getpagesize()


@dataclass(frozen=True, slots=True)
class Limits:
    """What a child may take: memory beyond that of the libraries, and time for one row."""

    memory_bytes: int
    row_cpu_s: float
    silence_s: float


class OverLimit(Exception):
    """The child took more than it may; the message says of what, `setting` what raises the limit."""

    def __init__(self, taken: str, setting: str) -> None:
        super().__init__(taken)
        self.setting = setting


class Watchdog:
    """Looks at one child. Everything before the first row counts as one row."""

    def __init__(self, pid: int, progress: Progress, limits: Limits) -> None:
        self._stat = Path(f"/proc/{pid}/stat")
        self._pid = pid
        self._progress = progress
        self._limits = limits
        self._position = -1
        cpu_s, resident_bytes = self._usage()
        self._row_cpu_s, self._row_s = cpu_s, time.monotonic()
        self._max_resident_bytes = resident_bytes + limits.memory_bytes

    def check(self) -> None:
        """Look once. Raises OverLimit; nothing where the child has just ended."""
        try:
            cpu_s, resident_bytes = self._usage()
        except (FileNotFoundError, ProcessLookupError):
            return
        limits = self._limits
        position, _ = self._progress.read()
        if position != self._position:
            self._position, self._row_cpu_s, self._row_s = position, cpu_s, time.monotonic()
            self._allow_cpu(cpu_s)
        if resident_bytes > self._max_resident_bytes:
            raise memory_exceeded(limits)
        if cpu_s - self._row_cpu_s > limits.row_cpu_s:
            raise cpu_exceeded(limits)
        if time.monotonic() - self._row_s > limits.silence_s:
            raise OverLimit(f"did not go on for {limits.silence_s:g} s", "QUARRY_PLAN_SILENCE_S")

    def _usage(self) -> tuple[float, int]:
        """Return CPU seconds and resident bytes of the child."""
        fields = self._stat.read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS_PER_S, int(fields[21]) * PAGE_BYTES

    def _allow_cpu(self, cpu_s: float) -> None:
        """Move the kernel's own limit on, which ends the child if this process cannot."""
        soft = math.ceil(cpu_s + 2 * self._limits.row_cpu_s) + 1
        with suppress(ProcessLookupError):
            resource.prlimit(self._pid, resource.RLIMIT_CPU, (soft, resource.RLIM_INFINITY))


def memory_exceeded(limits: Limits) -> OverLimit:
    """Return the error of a child that took too much memory."""
    return OverLimit(f"took more than {limits.memory_bytes} bytes of memory", "QUARRY_PLAN_MEMORY_BYTES")


def cpu_exceeded(limits: Limits) -> OverLimit:
    """Return the error of a child that took too much CPU time."""
    return OverLimit(f"took more than {limits.row_cpu_s:g} s of CPU time", "QUARRY_PLAN_ROW_CPU_S")
