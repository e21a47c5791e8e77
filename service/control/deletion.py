"""Deleting jobs that have ended, by request and by age.

What was pushed to the Hub stays there.
"""

import shutil
from contextlib import suppress
from pathlib import Path

from schemas.job import JobState
from service.errors import IllegalMove, NotFound, WriteFailed
from service.settings import Settings
from service.store import Store, jobs

DELETED = ".deleted-"
"""Prefix of a dataset folder that is being removed: half of a dataset never has a dataset's name."""


def delete_job(store: Store, settings: Settings, job_id: str, *, with_dataset: bool) -> None:
    """Delete a job that has ended: its plans and attempts, its dataset here if asked for, and its records.

    Cut off after its first step it is ended by `delete_old_jobs`, and the dataset is kept unless it had been
    taken out of sight.

    Raises:
        NotFound: there is no such job.
        IllegalMove: it has not ended.
        WriteFailed: a folder cannot be removed.
    """
    store.write(jobs.begin_deletion, job_id)
    dataset = settings.dataset_dir(job_id)
    hidden = dataset.with_name(f"{DELETED}{dataset.name}")
    try:
        if with_dataset:
            with suppress(FileNotFoundError):
                dataset.rename(hidden)
        for folder in (hidden, settings.work_root / job_id):
            _remove(folder)
    except OSError as error:
        cure = "mend the rights of that folder, then delete the job again"
        raise WriteFailed(f"{error.filename} cannot be removed: {error.strerror}", cure=cure) from error
    store.write(jobs.forget, job_id)


def delete_old_jobs(store: Store, settings: Settings) -> list[str]:
    """Delete the jobs that ended long enough ago, and end deletions that were cut off; return those jobs.

    Raises WriteFailed.
    """
    days = settings.keep_jobs_days
    old = store.read(jobs.to_delete, None if days is None else days * 86_400.0)
    for job in old:
        # Whoever began a deletion has chosen for its dataset; if it was to go, it is out of sight already.
        with_dataset = settings.delete_old_datasets and job.state is not JobState.DELETING
        with suppress(NotFound, IllegalMove):  # another worker was faster, or somebody resumed it
            delete_job(store, settings, job.id, with_dataset=with_dataset)
    return [job.id for job in old]


def _remove(folder: Path) -> None:
    with suppress(FileNotFoundError):
        shutil.rmtree(folder)
