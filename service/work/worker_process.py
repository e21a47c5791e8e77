"""A `quarry worker` as a child process: started, told to drain, and ended for certain."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import IO, cast

from service.settings import Settings
from service.work.placement import EVERYWHERE, Placement

LINGER_S = 2.0
JOB_ENDED_CODES = frozenset({0, 3})
"""What a worker of one job exits with when it has no more to do: 0 if the job is complete, 3 if it is not."""
EXIT_RESTS = 6
"""What a worker exits with whose engine dies again and again; another machine may do better."""
STOP_MARGIN_S = 30.0
"""Beyond `drain_s`: what a worker needs to give units back and to stop its engine."""


def worker_command(*arguments: str) -> list[str]:
    """Return the command line of a worker that ends when this process does (see `service.lifeline`).

    It reads its settings from its standard input.
    """
    return [sys.executable, "-m", "service.cli", "worker", "--parent-pid", str(os.getpid()), *arguments]


def stop_grace_s(settings: Settings) -> float:
    """Return how long to wait for a worker that was asked to end before it is killed."""
    return settings.drain_s + STOP_MARGIN_S


class WorkerProcess:
    """One child process in a session of its own: the terminal's Ctrl-C reaches it through its parent only.

    Must be made by a thread that lives as long as the child, and is used by that thread alone: the kernel
    tells a child of its parent's death when the *thread* that started it ends.
    """

    def __init__(
        self,
        command: Sequence[str],
        settings_json: bytes = b"",
        output: IO[bytes] | None = None,
        placement: Placement = EVERYWHERE,
    ) -> None:
        """Start it; its output goes to `output`, or where this process's goes. Raises OSError.

        It reads `settings_json` from its standard input, which reaches neither its environment nor its own
        children.
        """
        self._child = subprocess.Popen(  # noqa: S603 - the command is our own
            command,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT if output is not None else None,
            env=os.environ | placement.environment(),
            start_new_session=True,
        )
        if placement.cores is not None:
            with suppress(ProcessLookupError):  # it has ended already
                os.sched_setaffinity(self.pid, placement.cores)  # its threads inherit it, and its children
        pipe = cast(IO[bytes], self._child.stdin)
        with suppress(BrokenPipeError), pipe:  # it may have ended already
            pipe.write(settings_json)

    @property
    def pid(self) -> int:
        """The process id, which is also its group's."""
        return self._child.pid

    def exit_code(self) -> int | None:
        """Return its exit code (negative: the signal that killed it), or None while it runs.

        What a killed worker started and left behind is ended before its process id can be given to another:
        an engine would keep its GPU memory from the next worker. `LINGER_S` is for cleaning up shared memory.
        """
        if self._child.returncode is None:
            ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None:
                return None
            if ended.si_code != os.CLD_EXITED:
                os.killpg(self.pid, signal.SIGTERM)
                time.sleep(LINGER_S)
                os.killpg(self.pid, signal.SIGKILL)
            self._child.wait()
        return self._child.returncode

    def terminate(self) -> None:
        """Ask it to drain and end. Harmless when it has ended."""
        if self._child.returncode is None:
            # Popen's own `send_signal` would reap a child that has ended, and what it left would live on.
            os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """End it and everything that it started, at once."""
        if self._child.returncode is None:
            os.killpg(self.pid, signal.SIGKILL)
