"""Works on one kind of task alongside the captures, in a thread or process that is restarted if it dies.

Loops never communicate with each other: each leases its tasks from the store, so any of them may die and be
restarted.
"""

import logging
import math
import multiprocessing
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pkgutil import resolve_name
from typing import Self

from service.errors import STORE_AWAY
from service.lifeline import die_with_parent
from service.logs import log_to_stderr
from service.settings import Settings
from service.store import Store, tasks
from service.work.keeper import Keeper, process_keeper
from service.work.runner import LoopContext

logger = logging.getLogger(__name__)

STOP_S = 10.0
"""How long a graceful stop may take."""
LOOK_S = 1.0
"""How often a process checks whether one of its threads died; it then ends, and is restarted."""


def owner_name(role: str) -> str:
    """Return the name of a lease owner.

    It has the host, the process id, and a token that distinguishes a later process with the same id.
    """
    return f"{role}@{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"


class TaskLoop:
    """Takes one task after another while its context is open; within it, it may be restarted.

    It is used by one thread, which must live as long as the worker.
    """

    def __init__(
        self,
        role: str,
        run_next: str,
        settings: Settings,
        shared: tuple[Store, Keeper] | None = None,
        *,
        pause_s: float | None = None,
        threads: int = 1,
    ) -> None:
        """Prepare; nothing is started yet.

        `run_next` names a function like `service.plan.planner:run_planning`, which works on one task and
        returns whether there was one; if not, it is called again after `pause_s` (default: `poll_s`). With
        `shared`, it runs in a thread of this process, otherwise in `threads` threads of a new process.
        """
        self._role, self._run_next, self._settings, self._shared = role, run_next, settings, shared
        self._pause_s = settings.poll_s if pause_s is None else pause_s
        self._threads = threads
        self._owner = owner_name(role)
        self._stop = threading.Event()
        self._end_s = math.inf
        self.running = self._new()

    def __enter__(self) -> Self:
        """Start the thread or process."""
        self.running.start()
        return self

    def restart_if_dead(self) -> None:
        """Restart it after a crash; its tasks continue from what is in the store and on disk."""
        if not self.running.is_alive():
            logger.error("the %s ended; starting it again", self._role)
            self.running = self._new()
            self.running.start()

    def stop(self) -> None:
        """Ask it to end after its current step."""
        self._stop.set()
        self._end_s = min(self._end_s, time.monotonic() + STOP_S)
        if isinstance(self.running, BaseProcess):
            self.running.terminate()

    def __exit__(self, *_: object) -> None:
        """End it after its current step, and give its lease back.

        A thread that takes longer than `STOP_S` from the first `stop` keeps running, with its lease, until
        this process ends: see `release`.
        """
        self.stop()
        self.running.join(max(0.0, self._end_s - time.monotonic()))
        if isinstance(self.running, BaseProcess) and self.running.is_alive():
            self.running.kill()
            self.running.join()
        if not self.running.is_alive():
            self.release()

    def _new(self) -> threading.Thread | BaseProcess:
        name = f"quarry-{self._role}"
        begin = (self._role, self._run_next, self._pause_s)
        if self._shared is not None:
            store, keeper = self._shared
            context = LoopContext(store, self._settings, self._owner, keeper, self._stop.is_set)
            args = (*begin, context, self._stop.wait)
            return threading.Thread(target=_run, args=args, name=name, daemon=True)
        # Spawned, so that it does not inherit what the engine's imports started in this process.
        spawn = multiprocessing.get_context("spawn")
        place = (self._threads, begin, self._settings, self._owner, os.getpid())
        return spawn.Process(target=_run_in_process, args=place, name=name, daemon=True)

    def release(self) -> None:
        """Give its lease back, now that it ended or this process is ending; without a database, it expires.

        The process's last request to the Hub may still arrive: the Hub then refuses the next owner's commit,
        which is retried.
        """
        store = Store(self._settings.database())
        with suppress(*STORE_AWAY):
            store.write(tasks.release_owner, self._owner)
        store.close()


def _run(
    role: str,
    run_next: str,
    pause_s: float,
    context: LoopContext,
    wait: Callable[[float], object],
) -> None:
    """Work on one task after another; if there is none, wait and look again."""
    run = resolve_name(run_next)  # imported here, since that takes a while
    while not context.stopped():
        context.keeper.check()  # ends this loop and then its process; the next one keeps its leases
        found = False
        try:
            found = run(context)
        except STORE_AWAY as error:
            logger.warning("the %s has no database: %s", role, error)
        if not found:
            wait(pause_s)


def _run_in_process(
    num_threads: int, begin: tuple[str, str, float], settings: Settings, owner: str, parent_pid: int
) -> None:
    # SIGTERM is blocked and waited for: a handler that set an event would deadlock on the event's lock if it
    # ran while the loop held that lock.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    # The worker decides; Ctrl-C in a terminal reaches the whole process group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent(parent_pid)
    log_to_stderr(settings.log_format)
    store = Store(settings.database())
    stop = threading.Event()
    with process_keeper(settings) as keeper:
        args = (*begin, LoopContext(store, settings, owner, keeper, stop.is_set), stop.wait)
        threads = [threading.Thread(target=_run, args=args, daemon=True) for _ in range(num_threads)]
        for thread in threads:
            thread.start()
        while all(thread.is_alive() for thread in threads):
            if signal.sigtimedwait({signal.SIGTERM}, LOOK_S) is not None:
                break
        stop.set()
        for thread in threads:
            thread.join()
    store.close()
