"""Cleans this worker's folders: all of a completed job's, and other jobs' lost attempts and stored shards.

Moves into place files that were committed but not moved: their worker was killed in between, or never learned
of its commit.

Also deletes what a completed job leaves in the database and its publication no longer needs, and ends waits
that began while the database's clock was ahead.

Never touches an attempt that is leased, or committed but not stored. The next attempt at a unit removes what
a lost one left, but may run on another host.
"""

import time
from contextlib import suppress
from pathlib import Path

from schemas.job import JobState
from schemas.names import MAX_UNITS, is_job_id
from service.capture.attempt_files import attempt_folder, attempts_left, land_attempt, remove_stored
from service.control.deletion import PAUSE_S, remove_folder
from service.errors import NotFound, removing, writing
from service.host import host_of
from service.plan.posted import give_back, remove_gone
from service.settings import Settings
from service.store import HOME, Store, clock, consumers, deletion, jobs, units
from service.work.runner import LoopContext, attempt, one_of_many


def run_sweep(context: LoopContext) -> bool:
    """Sweep every job's folder once; return False, since there is no more to do now.

    Whatever cannot be removed is retried by the next sweep. Raises StoreUnavailable, DiskFull.
    """
    store, settings, stopped = context.store, context.settings, context.stopped
    host = host_of(store, settings)
    for folder in sorted(settings.work_root.glob("*")):
        if stopped():
            break
        if is_job_id(folder.name):
            with one_of_many("sweeping", store, folder.name), suppress(NotFound), removing():
                _sweep(store, settings, folder, host)
    if host != HOME:
        return False
    store.write(clock.set_right, settings.lease_s, settings.engine_rest_s)
    with attempt("setting the slots of schedules right"):
        store.write(clock.set_slots_right)
    for job_id in store.read(consumers.consumed):  # includes completed jobs, whose folder is gone
        with one_of_many("sweeping", store, job_id), suppress(NotFound), removing():
            store.write(consumers.expire, job_id)
            remove_stored(store, settings, job_id)
    for job_id in store.read(deletion.spent):
        with one_of_many("sweeping", store, job_id), suppress(NotFound):
            while not stopped() and store.write(deletion.forget_spent, job_id):
                time.sleep(PAUSE_S)
    # Whoever deleted such a schedule was already told what could not be removed.
    with attempt("sweeping the posted samples of deleted schedules"):
        remove_gone(store, settings)
    return False


def _sweep(store: Store, settings: Settings, folder: Path, host: int) -> None:
    """Raises NotFound if the job belongs to another database; OSError."""
    # Listed before the store is read, so that an attempt that begins in between, in a resumed job, is not
    # mistaken for a lost one.
    attempts = attempts_left(settings, folder.name)
    if store.read(deletion.was_deleted, folder.name):
        remove_folder(folder)
        return
    state = store.read(jobs.state, folder.name)
    if host == HOME:
        remove_stored(store, settings, folder.name)
    if state is JobState.COMPLETED:
        if host == HOME:
            give_back(store, settings, folder.name)
        remove_folder(folder)
    else:
        for left in attempts:
            unit = left.unit % MAX_UNITS
            with one_of_many("sweeping", store, folder.name), removing():
                if not store.read(units.needs_attempt, folder.name, unit, left.epoch):
                    remove_folder(attempt_folder(settings, left))
                elif host == HOME and left.unit == unit:
                    with writing(f"the files of unit {unit}"):
                        land_attempt(store, settings, left)
