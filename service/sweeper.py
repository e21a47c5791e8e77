"""Removes what is left of the work for a job that rests: of a complete job all of it, else the lost attempts.

Never touches an attempt that is committed, and none of a job that goes on: the next attempt at a unit removes
what a lost one left.
"""

import json
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from schemas.job import JobState
from schemas.names import MAX_UNITS, frozen_source_path
from schemas.request import PostedSource
from service.errors import WriteFailed
from service.settings import Settings
from service.store import Lease, Store, TaskState, jobs, schedules, tasks, units
from service.work.keeper import Keeper, Kept
from service.work.runner import run_next

ATTEMPT_NAME = re.compile(r"^(\d{5,6})-(\d+)$")
"""Unit and epoch; with six digits, the canary before that unit (`schemas.names.canary_unit`)."""


def sweep_next(
    store: Store, settings: Settings, owner: str, stopped: Callable[[], bool], keeper: Keeper
) -> bool:
    """Sweep a job that came to rest, if there is one; return whether there was.

    What cannot be removed now is tried again later.
    """

    def work(lease: Lease, kept: Kept) -> None:
        try:
            _sweep(store, settings, settings.work_root / lease.job_id)
        except OSError as error:
            raise WriteFailed(f"{error.filename} cannot be removed: {error.strerror}") from error
        store.write(tasks.end_sweep, lease)

    return run_next(
        store,
        keeper,
        take=lambda: tasks.lease_sweep(store, owner, settings.lease_s),
        work=work,
        fail=lambda lease, error: store.write(tasks.postpone, lease),
        stopped=stopped,
    )


def _sweep(store: Store, settings: Settings, folder: Path) -> None:
    # Listed before the store is asked: an attempt that begins in between, in a job that is resumed, is not
    # taken for a lost one.
    attempts = sorted((folder / "attempts").glob("*"))
    if store.read(jobs.state, folder.name) is JobState.COMPLETED:
        _remove_taken(store, settings, folder.name)
        _remove(folder)
        return
    kept = {
        (row.unit, row.epoch)
        for row in store.read(units.of_job, folder.name)
        if row.state in {TaskState.LEASED, TaskState.DONE}
    }
    for attempt in attempts:
        match = ATTEMPT_NAME.match(attempt.name)
        if match and (int(match[1]) % MAX_UNITS, int(match[2])) not in kept:
            _remove(attempt)


def _remove_taken(store: Store, settings: Settings, job_id: str) -> None:
    """Remove the posted samples that a complete job took, unless it left some to the next one."""
    source = store.read(jobs.request, job_id).source
    frozen = settings.work_root / frozen_source_path(job_id)
    if not isinstance(source, PostedSource) or source.schedule is None or not frozen.exists():
        return
    if not store.read(schedules.is_cut_short, job_id):
        for name in json.loads(frozen.read_text()):
            (settings.spool(source.schedule) / name).unlink(missing_ok=True)


def _remove(folder: Path) -> None:
    with suppress(FileNotFoundError):
        shutil.rmtree(folder)
