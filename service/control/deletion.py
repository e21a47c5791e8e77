"""Deletes jobs that have ended, on request and by age.

What was pushed to the Hub stays there.
"""

import shutil
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

from service.errors import IllegalMove, NotFound, removing
from service.plan.posted import give_back
from service.settings import Settings
from service.store import Lease, Store, deletion
from service.work.keeper import Kept
from service.work.runner import LoopContext, one_of_many, run_next

DELETED = ".deleted-"
"""Prefix of a dataset folder that is being removed, so that a partial dataset never has a dataset's name."""
PAUSE_S = 0.1
"""Pause between two steps of deleting a job's records, which lets others use the database."""


def delete_job(store: Store, settings: Settings, job_id: str, *, with_dataset: bool) -> None:
    """Delete a job that has ended: its plans and attempts, its dataset here if requested, and its records.

    Its deletion task continues with what cannot be removed now, and with the records of a large job.

    Raises:
        NotFound: there is no such job.
        IllegalMove: it has not ended.
        WriteFailed: a folder cannot be removed yet.
    """
    store.write(deletion.begin, job_id, with_dataset=with_dataset)
    _delete(store, settings, job_id)


def run_deletion(context: LoopContext) -> bool:
    """Delete one job whose deletion has begun; return whether there was one. Failures are retried."""
    store, settings = context.store, context.settings

    def work(lease: Lease, kept: Kept) -> None:
        while _delete(store, settings, lease.job_id):
            kept.check()
            time.sleep(PAUSE_S)

    take = partial(deletion.lease, store, context.owner, settings.lease_s)
    return run_next(context, take, work, max_attempts=1)


def run_retention(context: LoopContext) -> bool:
    """Start deleting the jobs that ended long enough ago; return False, since there is no more to do now.

    One whose dataset stays does so too where that counts for its owner's `max_bytes`. Raises
    StoreUnavailable, DiskFull.
    """
    store, settings = context.store, context.settings
    if settings.keep_jobs_days is not None:
        counted = set() if settings.delete_old_datasets else store.read(deletion.counted)
        for job_id in store.read(deletion.old, settings.keep_jobs_days * 86_400.0):
            if job_id in counted and settings.dataset_dir(job_id).exists():
                continue
            # Another worker may have been faster, or the job was resumed.
            with one_of_many("deleting old", store, job_id), suppress(NotFound, IllegalMove):
                store.write(deletion.begin, job_id, with_dataset=settings.delete_old_datasets)
    return False


def _delete(store: Store, settings: Settings, job_id: str) -> bool:
    """Remove a job's folders, and some of its records; return whether any are left. Raises WriteFailed."""
    with_dataset = store.read(deletion.takes_dataset, job_id)  # a later call may ask for that, too
    _remove_files(store, settings, job_id, with_dataset=with_dataset)
    return store.write(deletion.forget, job_id, keeps_dataset=not with_dataset)


def _remove_files(store: Store, settings: Settings, job_id: str, *, with_dataset: bool) -> None:
    """Remove a job's folders; any number of processes may do so at once. Raises WriteFailed."""
    with removing():
        if with_dataset:
            _remove_dataset(settings.dataset_dir(job_id))
        give_back(store, settings, job_id)
        remove_folder(settings.work_root / job_id)
        if with_dataset:  # a unit may have landed meanwhile; from now on none has files that could
            _remove_dataset(settings.dataset_dir(job_id))


def _remove_dataset(dataset: Path) -> None:
    hidden = dataset.with_name(f"{DELETED}{dataset.name}")
    remove_folder(hidden)  # of a try that was cut off: no folder takes the name of one that is not empty
    with suppress(FileNotFoundError):
        dataset.rename(hidden)
    remove_folder(hidden)


def remove_folder(folder: Path) -> None:
    """Remove a folder, if it exists; any number of processes may do so at once. Raises OSError."""
    while folder.exists():  # loops if another process removed one of its files meanwhile
        with suppress(FileNotFoundError):
            shutil.rmtree(folder)
