"""Keeps worker processes running: restarts one that dies, gives up in the end, stops workers gracefully."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import IO

from service.settings import Settings
from service.work.placement import EVERYWHERE, Placement
from service.work.worker_process import (
    EXIT_RESTS,
    JOB_ENDED_CODES,
    WorkerProcess,
    stop_grace_s,
    worker_command,
)

LOG = logging.getLogger(__name__)

CHECK_S = 0.2
FAST_CRASH_S = 60.0
"""A worker that ends sooner than this crashed fast: a restart is unlikely to help."""
MAX_FAST_CRASHES = 5
EXIT_WORKER_LOST = 4
"""Exit status when every worker has repeatedly crashed fast: staying up would only accept jobs that nothing
runs.
"""
WORK_DONE_CODES = JOB_ENDED_CODES | {EXIT_RESTS}
"""Exit codes of a worker that has no more to do, or leaves the rest to other machines."""
FIRST_DELAY_S = 1.0
"""Delay before a restart after a fast crash; it doubles with each further one. A crash that is not fast has
none.
"""
RETRY_S = 600.0
"""Delay before the restart of a worker that was given up while others on its node are alive."""


class Supervisor(threading.Thread):
    """Runs one worker at a time, in a thread that owns it. `start` it once; `join` it after `stop`.

    It ends when it is stopped, when a worker ends with one of `last_codes` (its work is done), or after
    `MAX_FAST_CRASHES` in a row; then `gave_up` is set and `on_giving_up` called, in this thread. If that
    returns true, the worker is tried again after `RETRY_S` instead.
    """

    def __init__(
        self,
        command: Sequence[str],
        settings_json: bytes,
        stop_grace_s: float,
        *,
        last_codes: frozenset[int] = frozenset(),
        output: IO[bytes] | None = None,
        on_giving_up: Callable[[], bool | None] = lambda: None,
        placement: Placement = EVERYWHERE,
    ) -> None:
        """Prepare. Each worker reads `settings_json`, and may drain for `stop_grace_s` before it is killed.

        Its output goes to `output`. `code` is the exit code of the last worker that ended.
        """
        super().__init__(name="worker-supervisor", daemon=True)
        self._command, self._settings_json, self._output = command, settings_json, output
        self._stop_grace_s = stop_grace_s
        self._last_codes = last_codes
        self._on_giving_up = on_giving_up
        self._placement = placement
        self._stopping = threading.Event()
        self.gave_up = threading.Event()
        self.code = 0

    def stop(self) -> None:
        """Ask the worker to shut down gracefully. May be called repeatedly, and from a signal handler."""
        self._stopping.set()

    def run(self) -> None:
        """Run workers until one of the three conditions holds."""
        fast_crashes, delay_s = 0, 0.0
        while not self._stopping.wait(delay_s):
            self.gave_up.clear()
            born = time.monotonic()
            try:
                child = WorkerProcess(self._command, self._settings_json, self._output, self._placement)
            except OSError as error:  # out of processes or memory: must not go unnoticed
                LOG.warning("the worker does not start: %s", error)
                code = self.code = EXIT_WORKER_LOST
            else:
                code = self.code = self._live(child)
            if self._stopping.is_set() or code in self._last_codes:
                return
            fast_crashes = fast_crashes + 1 if time.monotonic() - born < FAST_CRASH_S else 0
            delay_s = FIRST_DELAY_S * 2 ** (fast_crashes - 1) if fast_crashes else 0.0
            if fast_crashes == MAX_FAST_CRASHES:
                LOG.error("the worker ended with code %d, %d times in a row", code, fast_crashes)
                self.gave_up.set()
                if not self._on_giving_up():
                    return
                fast_crashes, delay_s = fast_crashes - 1, RETRY_S
            LOG.warning("the worker ended with code %d; starting it again in %.0f s", code, delay_s)

    def _live(self, worker: WorkerProcess) -> int:
        """Wait for `worker` to end, asking it to when this supervisor is stopped; return its exit code."""
        LOG.info("worker %d started", worker.pid)
        deadline: float | None = None
        while (code := worker.exit_code()) is None:
            if deadline is None:
                if self._stopping.wait(CHECK_S):
                    worker.terminate()
                    deadline = time.monotonic() + self._stop_grace_s
                continue
            time.sleep(CHECK_S)
            if time.monotonic() > deadline:
                LOG.warning("worker %d did not drain in %.0f s and is killed", worker.pid, self._stop_grace_s)
                worker.kill()
        return code


class NodeSupervisor:
    """One supervisor per worker of this node. It has given up when all of them have."""

    def __init__(
        self,
        settings: Settings,
        placements: Sequence[Placement],
        *arguments: str,
        last_codes: frozenset[int] = frozenset(),
        on_giving_up: Callable[[], None] = lambda: None,
    ) -> None:
        """Prepare. `arguments` are options of `quarry worker`; a supervisor's thread calls `on_giving_up`."""

        def given_up() -> bool:
            if self.gave_up:
                self.stop()
                on_giving_up()
            return not self.gave_up and not last_codes  # otherwise the others do its work and end

        self._supervisors = [
            Supervisor(
                worker_command(*arguments),
                settings.of_worker(number).with_secrets(),
                stop_grace_s(settings),
                last_codes=last_codes,
                on_giving_up=given_up,
                placement=placement,
            )
            for number, placement in enumerate(placements)
        ]

    @property
    def gave_up(self) -> bool:
        """Whether every worker has been given up."""
        return self.lost == len(self._supervisors)

    @property
    def lost(self) -> int:
        """How many workers repeatedly crashed fast and are not running now."""
        return sum(supervisor.gave_up.is_set() for supervisor in self._supervisors)

    @property
    def codes(self) -> list[int]:
        """The exit code of each supervisor's last worker."""
        return [supervisor.code for supervisor in self._supervisors]

    def start(self) -> None:
        """Start the workers."""
        for supervisor in self._supervisors:
            supervisor.start()

    def stop(self) -> None:
        """Ask them to shut down gracefully. May be called repeatedly, and from a signal handler."""
        for supervisor in self._supervisors:
            supervisor.stop()

    def join(self) -> None:
        """Wait until all have ended."""
        for supervisor in self._supervisors:
            supervisor.join()
