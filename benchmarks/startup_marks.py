"""When a process of a measured start-up reached a stage: a line a mark, in a file that all append to."""

import functools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

FILE = "QUARRY_STARTUP_FILE"


def mark(stage: str, at_s: float | None = None) -> None:
    """Write that `stage` was reached, now or at `at_s`, in seconds of `time.time`."""
    reached = time.time() if at_s is None else at_s
    with Path(os.environ[FILE]).open("a") as file:
        file.write(f"{reached:.3f} {stage}\n")


def mark_birth(stage: str, pid: int | str = "self") -> None:
    """Write when process `pid` was born, to a hundredth of a second; psutil's time is whole seconds off."""
    ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    mark(stage, time.time() - age_s)


def marked(stage: str, act: Callable[..., Any], *, before: bool = False) -> Callable[..., Any]:
    """Return `act`, which then marks `stage` when it has returned, or `before` it begins."""

    @functools.wraps(act)
    def told(*given: Any, **named: Any) -> Any:  # noqa: ANN401 - whatever it takes
        if before:
            mark(stage)
        found = act(*given, **named)
        if not before:
            mark(stage)
        return found

    return told


def first_marks(lines: list[str], begin_s: float) -> dict[str, float]:
    """Return for each stage the seconds from `begin_s` to its first mark, the earliest first."""
    found: dict[str, float] = {}
    for line in lines:
        at, stage = line.rstrip("\n").split(" ", 1)
        found[stage] = min(found.get(stage, float("inf")), float(at) - begin_s)
    return dict(sorted(found.items(), key=lambda item: item[1]))
