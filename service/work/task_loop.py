"""Works on one kind of task beside the captures, in a thread or a process that is started again when it dies.

Kinds never talk to each other: each takes its tasks from the store under a lease, so any of them may die and
come back.
"""

import logging
import multiprocessing
import os
import secrets
import signal
import socket
import threading
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

logger = logging.getLogger(__name__)

STOP_S = 10.0
"""How long an orderly end may take."""
LOOK_S = 1.0
"""How often a process looks whether one of its threads broke: it then ends, and is started again."""


def owner_name(role: str) -> str:
    """Return who holds a lease.

    Host, process, and a token that a later process of the same number does not have.
    """
    return f"{role}@{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"


class TaskLoop:
    """Takes task after task while its context is open, in which it may be started again.

    Used by one thread, which lives as long as the worker.
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
        """Start nothing yet.

        `run_next` names a function like `service.plan.planner:run_planning`, which works on one task and says
        whether there was one; if not, it is called again after `pause_s`, or else `poll_s`. With what this
        process shares it runs in a thread, else in `threads` of a process of its own.
        """
        self._role, self._run_next, self._settings, self._shared = role, run_next, settings, shared
        self._pause_s = settings.poll_s if pause_s is None else pause_s
        self._threads = threads
        self._owner = owner_name(role)
        self._stop = threading.Event()
        self.running = self._new()

    def __enter__(self) -> Self:
        """Start the thread or process."""
        self.running.start()
        return self

    def restart_if_dead(self) -> None:
        """Start it again after a crash; its tasks go on from what the store and the disk hold."""
        if not self.running.is_alive():
            logger.error("the %s ended; starting it again", self._role)
            self.running = self._new()
            self.running.start()

    def stop(self) -> None:
        """Ask it to end after the step that it is in."""
        self._stop.set()
        if isinstance(self.running, BaseProcess):
            self.running.terminate()

    def __exit__(self, *_: object) -> None:
        """End it after the step that it is in, and give its lease back.

        A thread that takes longer goes on until this process ends, with its lease: see `release`.
        """
        self.stop()
        self.running.join(STOP_S)
        if isinstance(self.running, BaseProcess) and self.running.is_alive():
            self.running.kill()
            self.running.join()
        if not self.running.is_alive():
            self.release()

    def _new(self) -> threading.Thread | BaseProcess:
        name = f"quarry-{self._role}"
        begin = (self._role, self._run_next, self._settings, self._owner, self._pause_s)
        if self._shared is not None:
            args = (*begin, self._stop.is_set, self._stop.wait, *self._shared)
            return threading.Thread(target=_run, args=args, name=name, daemon=True)
        # Spawned: what the engine's imports started in this process is not inherited.
        spawn = multiprocessing.get_context("spawn")
        place = (self._threads, begin, os.getpid())
        return spawn.Process(target=_run_in_process, args=place, name=name, daemon=True)

    def release(self) -> None:
        """Give its lease back, now that it or this process has ended; without a database that runs out.

        A request to the Hub that a process ended with may still arrive: the Hub then refuses the next owner's
        commit, which is made anew.
        """
        store = Store(self._settings.database())
        with suppress(*STORE_AWAY):
            store.write(tasks.release_owner, self._owner)
        store.close()


def _run(
    role: str,
    run_next: str,
    settings: Settings,
    owner: str,
    pause_s: float,
    stopped: Callable[[], bool],
    wait: Callable[[float], object],
    store: Store,
    keeper: Keeper,
) -> None:
    """Work on task after task, and look again after a while where there is none."""
    run = resolve_name(run_next)  # imported here, which takes a while
    while not stopped():
        found = False
        try:
            found = run(store, settings, owner, stopped, keeper)
        except STORE_AWAY as error:
            logger.warning("the %s has no database: %s", role, error)
        if not found:
            wait(pause_s)


def _run_in_process(num_threads: int, begin: tuple[str, str, Settings, str, float], parent_pid: int) -> None:
    # Held back and asked for: a handler that set an event would wait forever for the event's own lock, if it
    # came in the instant in which the loop held that.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    # The worker decides; a terminal's Ctrl-C reaches the whole group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent(parent_pid)
    settings = begin[2]
    log_to_stderr(settings.log_format)
    store = Store(settings.database())
    stop = threading.Event()
    with process_keeper(settings) as keeper:
        args = (*begin, stop.is_set, stop.wait, store, keeper)
        threads = [threading.Thread(target=_run, args=args, daemon=True) for _ in range(num_threads)]
        for thread in threads:
            thread.start()
        while all(thread.is_alive() for thread in threads) and not terminated():
            wait_for_termination(LOOK_S)
        stop.set()
        for thread in threads:
            thread.join()
    store.close()


def terminated() -> bool:
    """Say whether a SIGTERM that is held back has come."""
    return signal.SIGTERM in signal.sigpending()


def wait_for_termination(seconds: float) -> None:
    """Wait until a SIGTERM that is held back has come, which stays pending, or the time is over."""
    if signal.sigtimedwait({signal.SIGTERM}, seconds) is not None:
        signal.raise_signal(signal.SIGTERM)
