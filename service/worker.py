"""The worker process: a planner beside it, a publisher thread, and the capture loop with the engine.

The three never talk to each other; each takes its work from the store under a lease, so any of them may die
and come back.
"""

import asyncio
import logging
import multiprocessing
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.process import BaseProcess

from schemas.job import RESTING_JOB_STATES, JobState
from service.capture.loop import Capture, import_engine
from service.control.deletion import delete_old_jobs
from service.control.scheduling import submit_due
from service.errors import STORE_AWAY, WriteFailed
from service.lifeline import die_with_parent
from service.settings import Settings
from service.store import Store, jobs, migration, tasks
from service.sweeper import sweep
from service.work.keeper import Keeper, process_keeper

logger = logging.getLogger(__name__)

EXIT_OK = 0
EXIT_JOB_NOT_COMPLETE = 3

SWEEP_S = 300.0
CHILD_STOP_S = 10.0
RESTART_S = 2.0
IDLE_S = 1.0


def owner_name(role: str) -> str:
    """Return who holds a lease.

    Host, process, and a token that a later process of the same number does not have.
    """
    return f"{role}@{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"


def run_worker(settings: Settings, *, only_job: str | None = None, until_idle: bool = False) -> int:
    """Work until SIGTERM or SIGINT, then drain; with `only_job`, until that job has ended.

    With `until_idle`, until no job of the database is queued or worked on. Return the exit status.
    """
    with _imported_beside(settings):
        settings.data_dir.mkdir(parents=True, exist_ok=True)
        store = Store(settings.database())
        store.write(migration.migrate)
        _sweep(store, settings)
        _submit_due(store)
        planner = PlannerProcess(settings)
        with process_keeper(settings) as keeper:
            publisher = PublisherThread(settings, keeper)
            planner.start()
            publisher.start()
            try:
                asyncio.run(_main(store, settings, only_job, until_idle, planner, publisher, keeper))
            finally:
                publisher.stop()
                planner.stop()
        state = store.read(jobs.state, only_job) if only_job is not None else None
        store.close()
    return EXIT_OK if state in {None, JobState.COMPLETED} else EXIT_JOB_NOT_COMPLETE


@contextmanager
def _imported_beside(settings: Settings) -> Iterator[None]:
    """Import the engine meanwhile: seconds that would else follow the first plan.

    The block's end waits for it: torch and vLLM cannot be imported while the interpreter shuts down.
    """
    thread = threading.Thread(target=import_engine, args=(settings,), name="quarry-imports")
    thread.start()
    try:
        yield
    finally:
        thread.join()


async def _main(
    store: Store,
    settings: Settings,
    only_job: str | None,
    until_idle: bool,
    planner: "PlannerProcess",
    publisher: "PublisherThread",
    keeper: Keeper,
) -> None:
    capture = Capture(store, settings, owner_name("capture"), only_job=only_job, keeper=keeper)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, capture.stop.set)
    restarter = asyncio.create_task(_restart(store, settings, planner, publisher))
    # A restarter that broke would leave a dead planner dead: the worker drains, and ends with its error.
    restarter.add_done_callback(lambda _: capture.stop.set())
    idle = asyncio.create_task(_stop_when_idle(store, capture.stop)) if until_idle else None
    try:
        await capture.run()
        if only_job is not None:
            await _until_ended(store, only_job, capture.stop)
    finally:
        running = {restarter} | ({idle} if idle else set())
        for task in running:
            task.cancel()
        await asyncio.wait(running)
    if not restarter.cancelled():
        restarter.result()


async def _restart(
    store: Store, settings: Settings, planner: "PlannerProcess", publisher: "PublisherThread"
) -> None:
    """Start the planner or the publisher again if it died; make jobs of schedules; sweep now and then."""
    swept = time.monotonic()
    while True:
        await asyncio.sleep(RESTART_S)
        planner.restart_if_dead()
        publisher.restart_if_dead()
        await asyncio.to_thread(_submit_due, store)
        if time.monotonic() - swept > SWEEP_S:
            await asyncio.to_thread(_sweep, store, settings)
            swept = time.monotonic()


def _sweep(store: Store, settings: Settings) -> None:
    try:
        sweep(store, settings)
        delete_old_jobs(store, settings)
    except (WriteFailed, *STORE_AWAY) as error:
        logger.warning("not all was swept: %s", error)


def _submit_due(store: Store) -> None:
    try:
        submit_due(store)
    except STORE_AWAY as error:
        logger.warning("the schedules cannot be looked at: %s", error)


async def _stop_when_idle(store: Store, stop: asyncio.Event) -> None:
    """Set `stop` once every job rests: another worker that dies until then leaves its units to this one."""
    while True:
        try:
            counts = await asyncio.to_thread(store.read, jobs.counts)
        except STORE_AWAY as error:
            logger.warning("the jobs cannot be counted: %s", error)
        else:
            if not any(counts[state] for state in set(JobState) - RESTING_JOB_STATES):
                return stop.set()
        await asyncio.sleep(IDLE_S)


async def _until_ended(store: Store, job_id: str, stop: asyncio.Event) -> None:
    """Wait for the publisher to end the one job, or for a signal."""
    while not stop.is_set():
        try:
            state = await asyncio.to_thread(store.read, jobs.state, job_id)
        except STORE_AWAY as error:
            logger.warning("job %s cannot be looked at: %s", job_id, error)
            state = None
        if state in RESTING_JOB_STATES:
            return
        await asyncio.sleep(0.1)


def _release(store: Store, owner: str) -> None:
    """Give back what an owner holds that has ended in order; without a database its leases run out."""
    with suppress(*STORE_AWAY):
        store.write(tasks.release_owner, owner)
    store.close()


class PlannerProcess:
    """Planning in a process of its own: tokenizing holds the GIL that the engine's front end needs."""

    def __init__(self, settings: Settings) -> None:
        """Prepare; `start` starts it."""
        self._settings, self._owner = settings, owner_name("planner")
        self._context = multiprocessing.get_context("spawn")
        self._process: BaseProcess | None = None

    def start(self) -> None:
        """Start the process."""
        args = (self._settings, self._owner, os.getpid())
        self._process = self._context.Process(
            target=plan_until_stopped, args=args, name="quarry-planner", daemon=True
        )
        self._process.start()

    def restart_if_dead(self) -> None:
        """Start it again after a crash; plans begin where the store says."""
        if self._process is not None and not self._process.is_alive():
            logger.error("the planner ended with status %s; starting it again", self._process.exitcode)
            self.start()

    def stop(self) -> None:
        """End it: an unfinished plan is continued by the next planner, with the same bytes."""
        if self._process is not None:
            self._process.terminate()
            self._process.join(CHILD_STOP_S)
            if self._process.is_alive():
                self._process.kill()
                self._process.join()
            _release(Store(self._settings.database()), self._owner)


def plan_until_stopped(settings: Settings, owner: str, parent_pid: int) -> None:
    """Run the planning loop; the entry point of the planner process."""
    # Held back and asked for: a handler that set an event would wait for ever for the event's own lock, if it
    # came in the instant in which the loop below held that.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    # The worker decides; a terminal's Ctrl-C reaches the whole group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent(parent_pid)
    from service.plan.child.fork_server import FORK_SERVER
    from service.plan.planner import run_planning

    FORK_SERVER.warm()

    def stopped() -> bool:
        return signal.SIGTERM in signal.sigpending()

    store = Store(settings.database())
    with process_keeper(settings) as keeper:
        while not stopped():
            if not run_planning(store, settings, owner, stopped, keeper):
                wait_for_signal(signal.SIGTERM, settings.poll_s)
    store.close()


def wait_for_signal(number: signal.Signals, seconds: float) -> None:
    """Wait until a signal that is held back came, which stays pending, or the time is over."""
    if signal.sigtimedwait({number}, seconds) is not None:
        signal.raise_signal(number)


class PublisherThread:
    """Publishing in a thread: hashing and uploading release the GIL."""

    def __init__(self, settings: Settings, keeper: Keeper) -> None:
        """Prepare; `start` starts it. The keeper keeps its leases."""
        self._settings, self._keeper = settings, keeper
        self._stop = threading.Event()
        self._thread = self._new()

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def restart_if_dead(self) -> None:
        """Start it again after a crash; what was pushed is not pushed again."""
        if not self._thread.is_alive() and not self._stop.is_set():
            logger.error("the publisher ended; starting it again")
            self._thread = self._new()
            self._thread.start()

    def _new(self) -> threading.Thread:
        return threading.Thread(target=self._run, name="quarry-publisher", daemon=True)

    def stop(self) -> None:
        """Ask it to end after the upload it is in; whatever was pushed is not pushed again."""
        self._stop.set()
        self._thread.join(CHILD_STOP_S)

    def _run(self) -> None:
        from service.publish.publisher import run_publishing

        store = Store(self._settings.database())
        owner = owner_name("publisher")
        while not self._stop.is_set():
            if not run_publishing(store, self._settings, owner, self._stop.is_set, keeper=self._keeper):
                self._stop.wait(self._settings.poll_s)
        _release(store, owner)
