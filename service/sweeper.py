"""Removes what lost attempts left behind, and the plan and attempt folders of jobs that are complete.

Never touches an attempt that is leased or committed: the store says which those are, and it is asked after
the folder was listed, so that an attempt begun in between is never mistaken for a lost one. A job that the
store does not know is left alone: deleting a job removes its folder first, so the store is not the one that
belongs to the folder, or an older one that was restored.
"""

import logging
import re
import shutil
from pathlib import Path

from schemas.job import JobState
from schemas.names import MAX_UNITS, is_job_id
from service.errors import NotFound
from service.settings import Settings
from service.store import Store, TaskState, jobs, units

logger = logging.getLogger(__name__)

ATTEMPT_NAME = re.compile(r"^(\d{5,6})-(\d+)$")
"""Unit and epoch; with six digits, the canary before that unit (`schemas.names.canary_unit`)."""


def sweep(store: Store, settings: Settings) -> list[Path]:
    """Sweep every job's work folder; return what was removed. Several workers may sweep at the same time.

    What cannot be listed or removed now is left to the next sweep. Raises StoreUnavailable, DiskFull.
    """
    removed: list[Path] = []
    for folder in _listed(settings.work_root):
        if is_job_id(folder.name):
            removed += _sweep_job(store, folder)
    return removed


def _listed(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        logger.warning("%s cannot be listed: %s", folder, error)
        return []


def _sweep_job(store: Store, folder: Path) -> list[Path]:
    attempts = _listed(folder / "attempts")
    try:
        state = store.read(jobs.state, folder.name)
    except NotFound:
        logger.warning("%s belongs to no job of this database: is QUARRY_DATABASE_URL right?", folder)
        return []
    if state is JobState.COMPLETED:
        return _remove([folder])
    kept = {
        (row.unit, row.epoch)
        for row in store.read(units.of_job, folder.name)
        if row.state in {TaskState.LEASED, TaskState.DONE}
    }
    lost = []
    for attempt in attempts:
        match = ATTEMPT_NAME.match(attempt.name)
        if match and (int(match[1]) % MAX_UNITS, int(match[2])) not in kept:
            lost.append(attempt)
    return _remove(lost)


def _remove(paths: list[Path]) -> list[Path]:
    """Remove what can be removed, and return that; the rest is tried again by the next sweep."""
    removed = []
    for path in paths:
        try:
            shutil.rmtree(path)
        except FileNotFoundError:
            continue  # another worker sweeps it
        except OSError as error:
            logger.warning("%s cannot be removed: %s", path, error)
            continue
        removed.append(path)
    return removed
