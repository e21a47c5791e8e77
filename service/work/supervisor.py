"""Keeps one worker process running: starts it again when it dies, gives up in the end, stops it in order."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import IO

from service.work.worker_process import WorkerProcess

LOG = logging.getLogger(__name__)

CHECK_S = 0.2
FAST_CRASH_S = 60.0
"""A worker that lives shorter than this crashed fast: it will hardly fare better the next time."""
MAX_FAST_CRASHES = 5
FIRST_DELAY_S = 1.0
"""Before the next start after a fast crash; doubled by each further one. After a long life there is none."""


class Supervisor(threading.Thread):
    """Runs workers one after another, in a thread that owns them. `start` it once; `join` it after `stop`.

    It ends when it is stopped, when a worker ends with one of `last_codes` (its work is done), or after
    `MAX_FAST_CRASHES` in a row; then `gave_up` is set and `on_giving_up` called, in this thread.
    """

    def __init__(
        self,
        command: Sequence[str],
        settings_json: bytes,
        stop_grace_s: float,
        *,
        last_codes: frozenset[int] = frozenset(),
        output: IO[bytes] | None = None,
        on_giving_up: Callable[[], None] = lambda: None,
    ) -> None:
        """Prepare; each worker reads `settings_json`, and may drain for `stop_grace_s` before it is killed.

        Its output goes to `output`.
        """
        super().__init__(name="worker-supervisor", daemon=True)
        self._command, self._settings_json, self._output = command, settings_json, output
        self._stop_grace_s = stop_grace_s
        self._last_codes = last_codes
        self._on_giving_up = on_giving_up
        self._stopping = threading.Event()
        self.gave_up = threading.Event()

    def stop(self) -> None:
        """Ask for the worker's orderly end. May be called from a signal handler, and again."""
        self._stopping.set()

    def run(self) -> None:
        """Run workers until one of the three ends."""
        fast_crashes, delay_s = 0, 0.0
        while not self._stopping.wait(delay_s):
            born = time.monotonic()
            code = self._live(WorkerProcess(self._command, self._settings_json, self._output))
            if self._stopping.is_set() or code in self._last_codes:
                return
            fast_crashes = fast_crashes + 1 if time.monotonic() - born < FAST_CRASH_S else 0
            if fast_crashes == MAX_FAST_CRASHES:
                LOG.error("the worker ended with code %d, %d times in a row", code, fast_crashes)
                self.gave_up.set()
                self._on_giving_up()
                return
            delay_s = FIRST_DELAY_S * 2 ** (fast_crashes - 1) if fast_crashes else 0.0
            LOG.warning("the worker ended with code %d; starting it again in %.0f s", code, delay_s)

    def _live(self, worker: WorkerProcess) -> int:
        """Return the exit code of `worker`, which is asked to end when this supervisor is."""
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
