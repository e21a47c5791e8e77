"""The worker process: the capture loop with the engine, and alongside it everything that needs no engine."""

import asyncio
import logging
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial

from schemas.job import RESTING_JOB_STATES, JobState
from schemas.worker import Role
from service.capture.imports import import_engine
from service.capture.loop import Capture
from service.control.deletion import run_deletion, run_retention
from service.control.scheduling import submit_due
from service.control.webhooks import run_webhooks
from service.errors import STORE_AWAY, EngineDied, NotFound
from service.host import host_of
from service.lifeline import ORPHANED
from service.settings import Settings
from service.store import Store, jobs, schedules
from service.sweeper import run_sweep
from service.work.keeper import Keeper, process_keeper
from service.work.meters import served
from service.work.runner import LoopContext, migrate
from service.work.task_loop import TaskLoop, owner_name
from service.work.worker_process import EXIT_RESTS

logger = logging.getLogger(__name__)

EXIT_OK = 0
EXIT_JOB_NOT_COMPLETE = 3

PLANNING = "service.plan.planner:run_planning"
PUBLISHING = "service.publish.publisher:run_publishing"
STORING = "service.publish.storing:run_storing"
LOCAL_PUBLISHING = "service.publish.publisher:run_local_publishing"
WEBHOOKS, AT_ONCE = "service.control.webhooks:run_webhooks", 3
"""That many reports are sent at once: if all of them wait for slow receivers, other reports wait too."""
SWEEP_S = 300.0
SLOTS_S = 2.0
STORE_S = 1.0
LOST_S = 15.0
RESTART_S = 2.0


def run_worker(settings: Settings, *, only_job: str | None = None, until_idle: bool = False) -> int:
    """Work until SIGTERM or SIGINT, then drain; with `only_job`, until that job has ended.

    With `until_idle`, until no job of the database is queued or worked on that this worker may capture.
    Return the exit status; 128 + n if signal n came before that.
    """
    settings.data_dir.mkdir(parents=True, exist_ok=True)
    store = Store(settings.database())
    with served(settings), _imported_beside(settings), process_keeper(settings) as keeper:
        crew = _crew(store, settings, keeper)
        try:
            code = asyncio.run(_main(store, settings, keeper, crew, only_job, until_idle))
        finally:
            # A thread still waiting for the Hub ends with this process; that is not a crash.
            for beside in crew:
                beside.release()
    store.close()
    return code


def _crew(store: Store, settings: Settings, keeper: Keeper) -> list[TaskLoop]:
    """Return the loops run alongside the captures, by the worker's roles; none delays or ends another."""
    threads: dict[str, tuple[str, float | None]] = {"sweeper": ("service.sweeper:run_sweep", SWEEP_S)}
    if Role.STORE in settings.roles:
        threads["storer"] = (STORING, STORE_S)
    if Role.FINISH in settings.roles:
        threads |= {
            "slots": ("service.control.scheduling:run_slots", SLOTS_S),
            "lost-hosts": ("service.host:run_lost", LOST_S),
            "retention": ("service.control.deletion:run_retention", SWEEP_S),
            "deletion": ("service.control.deletion:run_deletion", None),
            **{f"webhooks-{number}": (WEBHOOKS, SLOTS_S) for number in range(AT_ONCE)},
            "local-publisher": (LOCAL_PUBLISHING, None),
            **{f"publisher-{number}": (PUBLISHING, None) for number in range(settings.publishers)},
        }
    planner = TaskLoop("planner", PLANNING, settings, threads=settings.planners)
    return [planner] * (Role.PLAN in settings.roles) + [
        TaskLoop(role, run_next, settings, (store, keeper), pause_s=pause_s)
        for role, (run_next, pause_s) in threads.items()
    ]


@contextmanager
def _imported_beside(settings: Settings) -> Iterator[None]:
    """Import the engine in the background; otherwise the first unit would wait seconds for it.

    The end of the block waits for the import: torch and vLLM cannot be imported during interpreter shutdown.
    """

    def import_now() -> None:
        with suppress(EngineDied):  # starting a unit's engine will report it
            import_engine(settings)

    thread = threading.Thread(target=import_now, name="quarry-imports")
    if Role.CAPTURE in settings.roles:
        thread.start()
    try:
        yield
    finally:
        if thread.ident is not None:
            thread.join()


async def _main(
    store: Store,
    settings: Settings,
    keeper: Keeper,
    crew: Sequence[TaskLoop],
    only_job: str | None,
    until_idle: bool,
) -> int:
    owner = owner_name("capture")
    capture = Capture(store, settings, owner, keeper, only_job=only_job)
    loop, told = asyncio.get_running_loop(), list[int]()

    def end(number: int) -> None:
        capture.stop.set()
        told.append(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end, number)
    loop.add_signal_handler(ORPHANED, capture.stop_at_once)
    await asyncio.to_thread(migrate, store, capture.stop.is_set)
    if not capture.stop.is_set():
        with suppress(*STORE_AWAY):  # asked again later
            await asyncio.to_thread(host_of, store, settings)
    state = None
    with ExitStack() as running:
        for beside in crew:
            running.enter_context(beside)
        for beside in crew:
            running.callback(beside.stop)  # all are asked before one is waited for
        is_idle = partial(_is_idle, store, settings, owner) if until_idle else None
        minder = asyncio.create_task(_mind(crew, keeper, is_idle))
        # It ends once every job rests. If it fails instead, nothing would restart a dead planner: the worker
        # then drains, and ends with its error.
        minder.add_done_callback(lambda _: capture.stop.set())
        try:
            await capture.run()
            if only_job is not None:
                state = await _until_ended(store, only_job, capture.stop)
        finally:
            minder.cancel()
            await asyncio.wait({minder})
    if not minder.cancelled():
        minder.result()
        await asyncio.to_thread(_last_turn, store, settings, keeper, lambda: bool(told))
    if until_idle and capture.rested:
        return EXIT_RESTS
    if until_idle and told and minder.cancelled():
        return 128 + told[0]
    return EXIT_OK if only_job is None or state is JobState.COMPLETED else EXIT_JOB_NOT_COMPLETE


async def _mind(crew: Sequence[TaskLoop], keeper: Keeper, is_idle: Callable[[], bool] | None = None) -> None:
    """Restart loops that died; return once `is_idle`. Raises QuarryError if leases are no longer kept."""
    while True:
        await asyncio.sleep(RESTART_S)
        keeper.check()
        for beside in crew:
            beside.restart_if_dead()
        if is_idle is not None and await asyncio.to_thread(is_idle):
            return


def _is_idle(store: Store, settings: Settings, owner: str) -> bool:
    """Return whether every job rests and no slot is due; until then this worker takes over lost work.

    The jobs are checked again after the slots, one of which may have become a job in between. Away from the
    data folder, whose free space is not known there, slots are not decided but waited for.
    """
    try:
        if not _all_rest(store, owner):
            return False
        waits = submit_due(store, settings) if settings.is_at_home else store.read(schedules.due)
        return not waits and _all_rest(store, owner)
    except STORE_AWAY as error:
        logger.warning("the jobs cannot be counted: %s", error)
        return False


def _all_rest(store: Store, owner: str) -> bool:
    """Return whether every job rests, apart from those whose model this worker leaves to others."""
    counts = store.read(jobs.counts, owner)
    return not any(counts[state] for state in set(JobState) - RESTING_JOB_STATES)


def _last_turn(store: Store, settings: Settings, keeper: Keeper, stopped: Callable[[], bool]) -> None:
    """Report the last jobs that ended, and sweep and delete what they leave: no other worker may follow."""
    context = LoopContext(store, settings, owner_name("last-turn"), keeper, stopped)
    finishing = (run_webhooks, run_retention, run_deletion) if Role.FINISH in settings.roles else ()
    for run in (run_sweep, *finishing):
        try:
            while not stopped() and run(context):
                pass  # the next job
        except STORE_AWAY as error:
            logger.warning("not all of the jobs that ended were reported and deleted: %s", error)


async def _until_ended(store: Store, job_id: str, stop: asyncio.Event) -> JobState | None:
    """Wait for the publisher to end the one job, or for a signal; return its state, None if it is deleted."""
    while True:
        state = None
        try:
            state = await asyncio.to_thread(store.read, jobs.state, job_id)
        except STORE_AWAY as error:
            logger.warning("job %s cannot be looked at: %s", job_id, error)
        except NotFound as error:
            logger.warning("%s", error)
            return None
        if state in RESTING_JOB_STATES or stop.is_set():
            return state
        await asyncio.sleep(0.1)
