"""Samples posted to a schedule: they wait in its spool until a job takes them by renaming the files.

A spool is named after the schedule's number, which no database assigns again. A file is in one place: a
spool, or the work folder of the job that took it. All of these are below the data folder, on one file system.
"""

import hashlib
import json
import secrets
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from schemas.dataset.seal import fsync, make_folder, sealing
from schemas.names import frozen_source_path, passed_on_path, posted_path
from service.errors import WriteFailed, removing, writing
from service.settings import Settings
from service.store import Store, spools

SUFFIX = ".jsonl"


def keep(settings: Settings, spool: int, lines: bytes) -> None:
    """Store samples durably, as one line of JSON each; posting the same lines again gives the same file.

    Raises DiskFull, WriteFailed.
    """
    path = settings.spool(spool) / f"{hashlib.sha256(lines).hexdigest()}{SUFFIX}"
    with writing("the posted samples"), sealing(path, secrets.token_hex(4)) as temporary:
        temporary.write_bytes(lines)


def bytes_of(store: Store, settings: Settings, owner: str) -> int:
    """Return the bytes of an owner's posted samples: in spools, and with the jobs that took them."""
    folders = [settings.spool(number) for number in store.read(spools.of_owner, owner)]
    for job_id in store.read(spools.takers, owner):
        folders += [settings.work_root / path(job_id) for path in (posted_path, passed_on_path)]
    num_bytes = 0
    for file in (file for folder in folders for file in folder.glob(f"*{SUFFIX}")):
        with suppress(FileNotFoundError):  # it has just been taken, or removed
            num_bytes += file.stat().st_size
    return num_bytes


def take(
    settings: Settings, spool: int, job_id: str, earlier: Mapping[str, bool], check: Callable[[], None]
) -> None:
    """Take what waits for a job, and what the runs in `earlier` left; continues where a dead planner stopped.

    A run that has written something (the mapping's value) keeps its files, and the job gets copies: if that
    run is deleted, its samples must be captured again. `check` is called before each file. Raises what
    `check` raises, DiskFull, and WriteFailed, also if the job's folder for the files does not exist.
    """
    taken = settings.work_root / posted_path(job_id)
    with writing("the posted samples"):
        for run, has_written in earlier.items():
            folder = settings.work_root / posted_path(run)
            for file in _files(folder):
                check()
                if has_written:
                    _pass_on(file, taken, settings.work_root / passed_on_path(run))
                else:
                    _move(file, taken)
        for file in _files(settings.spool(spool)):
            check()
            _move(file, taken)
        fsync(taken)


def give_back(store: Store, settings: Settings, job_id: str) -> None:
    """Return to the spool what an ended job took but no dataset holds, before the job's folder is removed.

    Raises OSError.
    """
    left = store.read(spools.left_by, job_id)
    if left is None:
        return
    frozen = settings.work_root / frozen_source_path(job_id)
    planned = set(json.loads(frozen.read_text())) if frozen.exists() else set()
    spool = settings.spool(left.spool)
    make_folder(spool)
    for path, is_written in ((posted_path, left.is_whole), (passed_on_path, left.is_completed)):
        folder = settings.work_root / path(job_id)
        for file in _files(folder):
            # A planner that had lost its lease may have taken files that are not in the plan.
            if is_written and (path is passed_on_path or file.name in planned):
                file.unlink(missing_ok=True)
            else:
                _move(file, spool)
        for copy in folder.glob("*.tmp"):
            copy.unlink(missing_ok=True)
        with suppress(FileNotFoundError):
            folder.rmdir()  # fails if that planner takes a file now
    fsync(spool)


def remove_gone(store: Store, settings: Settings) -> None:
    """Remove the spools of this database's deleted schedules. Raises WriteFailed once all were tried."""
    spooled = {folder.name for folder in settings.spool_root.glob("*")}
    failed: WriteFailed | None = None
    for number in store.read(spools.deleted):
        if str(number) in spooled:
            try:
                remove_spool(settings, number)
            except WriteFailed as error:
                failed = error
    if failed is not None:
        raise failed


def remove_spool(settings: Settings, spool: int) -> None:
    """Remove what waits in the spool of a deleted schedule. Raises WriteFailed."""
    with removing(), suppress(FileNotFoundError):
        shutil.rmtree(settings.spool(spool))


def _pass_on(file: Path, taken: Path, kept: Path) -> None:
    """Copy a file to `taken`, then move it to `kept`; after a sweep or deletion the file is in the spool."""
    # The folder `taken` is not created if the job was deleted: files moved into it would be lost.
    temporary = taken / f"{file.name}.{secrets.token_hex(4)}.tmp"
    with suppress(FileNotFoundError):
        shutil.copyfile(file, temporary)
        fsync(temporary)
        temporary.replace(taken / file.name)
        # A power cut that kept only the move would lose it: the run's give-back removes what it passed on.
        fsync(taken)
        make_folder(kept, kept.parent)
        _move(file, kept)


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"*{SUFFIX}"))


def _move(file: Path, folder: Path) -> None:
    """Move a file, unless another process has already moved it or has removed the folder with its job."""
    with suppress(FileNotFoundError):
        file.replace(folder / file.name)
