"""Runs one task from its lease to its recorded end, whatever happens in between."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TypeVar

from service.errors import (
    STORE_AWAY,
    IllegalMove,
    LeaseLost,
    NotFound,
    QuarryError,
    VersionRefused,
    internal_error,
)
from service.logs import working_on
from service.settings import Settings
from service.store import Lease, Store, jobs, migration, tasks
from service.store.database import said_by_driver
from service.work.keeper import Keeper, Kept, Stopped

logger = logging.getLogger(__name__)

AnyLease = TypeVar("AnyLease", bound=Lease)

RECORD_S = 1.0
"""Time between two tries to write to a database that is away."""


@dataclass(frozen=True, slots=True)
class LoopContext:
    """What one owner's tasks are worked on with; `stopped` says whether this process is stopping."""

    store: Store
    settings: Settings
    owner: str
    keeper: Keeper
    stopped: Callable[[], bool] = lambda: False


def run_next(
    context: LoopContext,
    take: Callable[[], AnyLease | None],
    work: Callable[[AnyLease, Kept], None],
    max_attempts: int,
    hub_attempts: int | None = None,
) -> bool:
    """Lease a task and work on it; return whether there was one.

    `work` records its own success, and raises QuarryError or Stopped. After an error, `tasks.fail`, which
    gets `max_attempts` and `hub_attempts`, decides what happens to the task.
    """
    try:
        lease = take()
    except STORE_AWAY as error:
        logger.warning("nothing can be leased: %s", error)
        return False
    if lease is None:
        return False
    store, stopped = context.store, context.stopped
    with context.keeper.keep(lease, stopped=stopped) as kept:
        with attempt(f"the {lease.kind} of job {lease.job_id}", **lease.named()) as end:
            work(lease, kept)
        if end.stopped:
            record(lambda: store.write(tasks.release, lease), stopped)
        elif (failure := end.error) is not None:
            problem, outcome = failure.problem(), failure.outcome
            bounds = max_attempts, failure.wait_s, hub_attempts
            record(lambda: store.write(tasks.fail, lease, problem, outcome, *bounds), stopped)
    return True


@dataclass(slots=True)
class End:
    """How an unsuccessful attempt ended: stopped, with an error, or (neither set) with its lease lost."""

    stopped: bool = False
    error: QuarryError | None = None


@contextmanager
def attempt(what: str, **named: object) -> Iterator[End]:
    """Run one attempt within the context, which swallows exceptions; the caller acts on the yielded End.

    Log records in it have the fields `named`, such as the lease's.
    """
    end = End()
    with working_on(**named):
        try:
            yield end
        except LeaseLost as error:
            logger.info("%s: %s", what, error)
        except Stopped:
            end.stopped = True
        except QuarryError as error:
            logger.warning("%s: %s", what, error.detail)
            end.error = error
        except Exception as error:
            # Supervisor: one task's bug must not end the work on all others.
            logger.exception("%s", what)
            end.error = internal_error(error)


@contextmanager
def one_of_many(what: str, store: Store, job_id: str) -> Iterator[None]:
    """Do for one job what is repeated for many; an error becomes an event of the job; the next round retries.

    Raises StoreUnavailable and DiskFull, since it then cannot be done for any job.
    """
    with attempt(f"{what} job {job_id}", job=job_id) as end:
        yield
    if end.error is not None and not isinstance(end.error, STORE_AWAY):
        problem = end.error.problem()
        # If it is the job's row or its events that cannot be read, the log alone says so.
        with attempt(f"noting a problem of job {job_id}", job=job_id) as end, suppress(NotFound):
            store.write(jobs.note, job_id, problem)  # NotFound: of another database, or deleted
    if isinstance(end.error, STORE_AWAY):
        raise end.error


def migrate(store: Store, stopped: Callable[[], bool] = lambda: False) -> None:
    """Migrate the database to this version; wait for it while it is away, until `stopped`.

    Raises VersionRefused.
    """
    while not stopped():
        try:
            return store.write(migration.migrate)
        except VersionRefused:
            raise
        except STORE_AWAY as error:
            logger.warning("waiting for the database: %s%s", error, said_by_driver(error))
        time.sleep(RECORD_S)


def record(call: Callable[[], None], stopped: Callable[[], bool]) -> bool:
    """Call until the store answers or this process stops; return whether it has answered.

    A task that another owner has taken needs no record.
    """
    while True:
        try:
            call()
        except (LeaseLost, IllegalMove) as error:
            logger.info("%s", error)
        except STORE_AWAY as error:
            logger.warning("not recorded yet: %s", error)
            if stopped():
                return False
            time.sleep(RECORD_S)
            continue
        return True
