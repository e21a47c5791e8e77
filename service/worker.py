"""The worker process: the capture loop with the engine, and beside it a planner process and a publisher."""

import asyncio
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from schemas.job import RESTING_JOB_STATES, JobState
from service.capture.loop import Capture, import_engine
from service.control.deletion import delete_old_jobs
from service.control.scheduling import submit_due
from service.errors import STORE_AWAY, WriteFailed
from service.settings import Settings
from service.store import Store, jobs
from service.sweeper import sweep_next
from service.work.beside import Beside, owner_name
from service.work.keeper import Keeper, process_keeper
from service.work.runner import migrate

logger = logging.getLogger(__name__)

EXIT_OK = 0
EXIT_JOB_NOT_COMPLETE = 3

SWEEP_S = 300.0
RESTART_S = 2.0


def run_worker(settings: Settings, *, only_job: str | None = None, until_idle: bool = False) -> int:
    """Work until SIGTERM or SIGINT, then drain; with `only_job`, until that job has ended.

    With `until_idle`, until no job of the database is queued or worked on. Return the exit status.
    """
    settings.data_dir.mkdir(parents=True, exist_ok=True)
    store = Store(settings.database())
    with _imported_beside(settings), process_keeper(settings) as keeper:
        state = asyncio.run(_main(store, settings, keeper, only_job, until_idle))
    store.close()
    return EXIT_OK if only_job is None or state is JobState.COMPLETED else EXIT_JOB_NOT_COMPLETE


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
    store: Store, settings: Settings, keeper: Keeper, only_job: str | None, until_idle: bool
) -> JobState | None:
    """Return the state in which the one job was left, if there is one."""
    capture = Capture(store, settings, owner_name("capture"), keeper, only_job=only_job)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, capture.stop.set)
    await asyncio.to_thread(migrate, store, capture.stop.is_set)
    state = None
    with (
        Beside("planner", "service.plan.planner:run_planning", settings) as planner,
        Beside("publisher", "service.publish.publisher:run_publishing", settings, keeper) as publisher,
    ):
        sweep = partial(_sweep, store, settings, keeper, capture.stop.is_set)
        minder = asyncio.create_task(_mind(store, (planner, publisher), sweep, until_idle))
        # Where every job rests; or it broke, and would leave a dead planner dead: the worker then drains, and
        # ends with its error.
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
    return state


async def _mind(store: Store, beside: Sequence[Beside], sweep: Callable[[], None], until_idle: bool) -> None:
    """Start again what died, make jobs of schedules, and sweep now and then.

    With `until_idle`, return once every job rests.
    """
    swept = float("-inf")
    while True:
        await asyncio.to_thread(_submit_due, store)
        if time.monotonic() - swept > SWEEP_S:
            await asyncio.to_thread(sweep)
            swept = time.monotonic()
        await asyncio.sleep(RESTART_S)
        for one in beside:
            one.restart_if_dead()
        if until_idle and await asyncio.to_thread(_is_idle, store):
            await asyncio.to_thread(sweep)  # no other worker may come
            return


def _sweep(store: Store, settings: Settings, keeper: Keeper, stopped: Callable[[], bool]) -> None:
    while sweep_next(store, settings, owner_name("sweeper"), stopped, keeper) and not stopped():
        pass  # the next job
    try:
        delete_old_jobs(store, settings)
    except (WriteFailed, *STORE_AWAY) as error:
        logger.warning("not all old jobs were deleted: %s", error)


def _submit_due(store: Store) -> None:
    try:
        submit_due(store)
    except STORE_AWAY as error:
        logger.warning("the schedules cannot be looked at: %s", error)


def _is_idle(store: Store) -> bool:
    """Say whether every job rests: what another worker loses until then is left to this one."""
    try:
        counts = store.read(jobs.counts)
    except STORE_AWAY as error:
        logger.warning("the jobs cannot be counted: %s", error)
        return False
    return not any(counts[state] for state in set(JobState) - RESTING_JOB_STATES)


async def _until_ended(store: Store, job_id: str, stop: asyncio.Event) -> JobState | None:
    """Wait for the publisher to end the one job, or for a signal; return the job's state."""
    while True:
        state = None
        try:
            state = await asyncio.to_thread(store.read, jobs.state, job_id)
        except STORE_AWAY as error:
            logger.warning("job %s cannot be looked at: %s", job_id, error)
        if state in RESTING_JOB_STATES or stop.is_set():
            return state
        await asyncio.sleep(0.1)
