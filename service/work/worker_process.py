"""A `quarry worker` as a child process: starts it, tells it to drain, and reliably ends it."""

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
"""Exit codes of a worker of one job when it has no more to do: 0 if the job is complete, 3 if not."""
EXIT_RESTS = 6
"""Exit code of a worker whose engine dies again and again, or refuses jobs; another machine may do better."""
STOP_MARGIN_S = 60.0
"""Time beyond `drain_s` that a worker needs to give units back, and to stop its engine and its loops."""


def worker_command(*arguments: str) -> list[str]:
    """Return the command line of a worker that ends when this process does (see `service.lifeline`).

    It reads its settings from its standard input.
    """
    return [sys.executable, "-m", "service.cli", "worker", "--parent-pid", str(os.getpid()), *arguments]


def stop_grace_s(settings: Settings) -> float:
    """Return how long to wait before killing a worker that was asked to end."""
    return settings.drain_s + STOP_MARGIN_S


class WorkerProcess:
    """A child process in a session of its own, so that the terminal's Ctrl-C reaches it only via its parent.

    It must be created and used by one thread, which lives as long as the child: the kernel signals the
    parent's death to a child when the *thread* that started it ends.
    """

    def __init__(
        self,
        command: Sequence[str],
        settings_json: bytes = b"",
        output: IO[bytes] | None = None,
        placement: Placement = EVERYWHERE,
    ) -> None:
        """Start it; its output goes to `output`, or to this process's own. Raises OSError.

        It reads `settings_json` from its standard input, so they are in neither its environment nor its
        children's.
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
                os.sched_setaffinity(self.pid, placement.cores)  # inherited by its threads and children
        pipe = cast(IO[bytes], self._child.stdin)
        with suppress(BrokenPipeError), pipe:  # it may have ended already
            pipe.write(settings_json)

    @property
    def pid(self) -> int:
        """The process id, which is also its group's."""
        return self._child.pid

    def exit_code(self) -> int | None:
        """Return its exit code (negative: the signal that killed it), or None while it is running.

        Processes that a killed worker left behind are ended before its process id can be reused: otherwise an
        engine would keep GPU memory from the next worker. `LINGER_S` lets them clean up shared memory.
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
        """Ask it to drain and end. Harmless if it has ended."""
        if self._child.returncode is None:
            # Popen's own `send_signal` would reap a child that has ended, and its leftover processes would
            # live on.
            os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """Kill it and everything that it started, at once."""
        if self._child.returncode is None:
            os.killpg(self.pid, signal.SIGKILL)
