"""Runs of pytest in forks of a process that has imported what is slow to import, some side by side."""

import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

SIDE_BY_SIDE = 2
CRASHED = 70
"""Exit code of a run that could not start pytest."""
RUN = "QUARRY_MUTANTS_RUN"
"""Names the run in the environment of every process that its tests start."""
OPTIONS = (
    *("-q", "-p", "no:cacheprovider", "-p", "no:randomly", "--hypothesis-seed=0", "-o", "addopts="),
    *("-W", "ignore::pytest.PytestAssertRewriteWarning"),  # plugins are imported before the fork
)


@dataclass(frozen=True)
class Run:
    """One run of pytest: how it is called, where its output goes, and how long it may take."""

    name: str
    arguments: list[str]
    output: Path
    limit_s: float
    environment: dict[str, str] = field(default_factory=dict)
    plugins: Callable[[], list[object]] = field(default=list)


def run_all(runs: Iterable[Run]) -> Iterator[tuple[Run, int | None, float]]:
    """Yield each run as it ends, with pytest's exit code and its seconds.

    The code is None where it ran past its limit or died. The processes that its tests left behind are killed.
    """
    waiting, under_way = iter(runs), {}
    try:
        while True:
            while len(under_way) < SIDE_BY_SIDE and (run := next(waiting, None)) is not None:
                pid = _fork(run)
                under_way[os.pidfd_open(pid)] = (run, pid, time.monotonic())
            if not under_way:
                return
            due = min(begun + run.limit_s for run, _, begun in under_way.values())
            ended = select.select(list(under_way), [], [], max(due - time.monotonic(), 0))[0]
            for watch, (run, pid, begun) in list(under_way.items()):
                seconds = time.monotonic() - begun
                if watch in ended or seconds >= run.limit_s:
                    del under_way[watch]
                    os.close(watch)
                    yield run, _end(run, pid), seconds
    finally:
        for run, pid, _ in under_way.values():
            _end(run, pid)


def _end(run: Run, pid: int) -> int | None:
    """Kill what there still is of a run; return pytest's exit code, None where there is none."""
    os.kill(pid, signal.SIGKILL)
    status = os.waitpid(pid, 0)[1]
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(RUN) == run.name:
                process.kill()
                process.wait()
    return os.WEXITSTATUS(status) if os.WIFEXITED(status) else None


def _fork(run: Run) -> int:
    """Start a run as the leader of a session of its own and return its process id."""
    pid = os.fork()
    if pid:
        return pid
    code = CRASHED
    try:
        os.setsid()
        output = os.open(run.output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ.update(run.environment, **{RUN: run.name})
        code = int(pytest.main([*OPTIONS, *run.arguments], plugins=run.plugins()))
    except BaseException:
        traceback.print_exc()
        raise
    finally:  # nothing may pass into the parent's own code
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
