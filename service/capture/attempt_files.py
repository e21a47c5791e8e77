"""Landing: moves a committed unit's files from their attempt's folder to their place in the dataset folder.

The commit comes first and names the attempt, so repeating the move, or finishing it after a crash, is
harmless. An attempt that was never committed cannot land, whatever it wrote.
"""

import asyncio
import re
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from schemas.dataset.seal import make_folder, move_durably
from schemas.names import PLAN_FILE, attempt_dir
from schemas.receipts import AttemptId, OpenUnit
from service.capture.link import EngineLink
from service.errors import WriteFailed, writing
from service.settings import Settings
from service.store import HOME, Store, UnitCommit, UnitFiles, commits

INDEX_FILE = "index.parquet"
"""Name of a unit's index file inside its attempt's folder."""
ATTEMPT_NAME = re.compile(r"^(1?\d{5})-([1-9]\d*)$")
"""Unit and epoch; with six digits, the canary before that unit (`schemas.names.canary_unit`)."""


def attempt_folder(settings: Settings, attempt_id: AttemptId) -> Path:
    """Return the folder that only this attempt writes to."""
    return settings.work_root / attempt_dir(attempt_id.job_id, attempt_id.unit, attempt_id.epoch)


def attempts_left(settings: Settings, job_id: str) -> list[AttemptId]:
    """Return the job's attempts that have a folder, canaries among them."""
    names = sorted(folder.name for folder in (settings.work_root / job_id / "attempts").glob("*"))
    found = (match for name in names if (match := ATTEMPT_NAME.match(name)))
    return [AttemptId(job_id=job_id, unit=int(name[1]), epoch=int(name[2])) for name in found]


def remove_earlier(settings: Settings, attempt_id: AttemptId) -> None:
    """Remove what earlier attempts at the unit left behind, as far as the disk allows."""
    for folder in attempt_folder(settings, attempt_id).parent.glob(f"{attempt_id.unit:05d}-*"):
        if int(folder.name.partition("-")[2]) < attempt_id.epoch:
            shutil.rmtree(folder, ignore_errors=True)


async def open_attempt(link: EngineLink, settings: Settings, order: OpenUnit, plan: bytes) -> None:
    """Open an attempt on every rank; its plan is in its folder while the ranks open it.

    Raises what `EngineLink.open` raises, DiskFull, WriteFailed.
    """
    file = attempt_folder(settings, order.attempt_id) / PLAN_FILE

    def write() -> None:
        with writing(f"the plan of {order.attempt_id}"):
            make_folder(file.parent)
            file.write_bytes(plan)

    try:
        await asyncio.to_thread(write)
        await link.open(order)
    finally:
        with suppress(OSError):  # the sweeper removes what is left
            file.unlink()


def move_into_dataset(settings: Settings, unit: UnitFiles) -> None:
    """Move one committed unit's files. Raises WriteFailed, naming the file, if one is in neither place."""
    folder = attempt_folder(settings, unit.attempt_id)
    dataset = settings.dataset_dir(unit.attempt_id.job_id)
    sealed = sealed_files(settings, unit)
    for entry in unit.files:
        try:
            move_durably(sealed[entry.path], dataset / entry.path)
        except FileNotFoundError as error:
            raise WriteFailed(
                f"{entry.path} was committed, but is neither in its attempt's folder nor in the dataset",
                cure="restore the data folder, or cancel the job and send it under another Idempotency-Key",
            ) from error
    # Other files there are swept later, and another process may be landing the same unit now.
    with suppress(OSError):
        folder.rmdir()


def sealed_files(settings: Settings, unit: UnitFiles) -> dict[str, Path]:
    """Return where a committed unit's files are before it has landed, by their paths in the dataset."""
    folder = attempt_folder(settings, unit.attempt_id)
    files = {entry.path: folder / Path(entry.path).name for entry in unit.shards}
    return files if unit.index is None else files | {unit.index.path: folder / INDEX_FILE}


def remove_attempt(settings: Settings, attempt_id: AttemptId) -> None:
    """Remove what an attempt wrote, as far as the disk allows; the sweeper removes the rest."""
    shutil.rmtree(attempt_folder(settings, attempt_id), ignore_errors=True)


def land(store: Store, settings: Settings, made: Iterable[UnitCommit]) -> None:
    """Land those units of a job that were committed on this host and are not stored."""
    for commit in made:
        if not commit.is_stored and commit.host == HOME:
            land_unit(store, settings, commit)


def land_left(store: Store, settings: Settings, job_id: str) -> None:
    """Land the committed, unstored units that are still in their attempts' folders."""
    for attempt_id in attempts_left(settings, job_id):
        land_attempt(store, settings, attempt_id)


def land_attempt(store: Store, settings: Settings, attempt_id: AttemptId) -> None:
    """Land the unit that an attempt committed in the data folder, if it did and the unit is not stored."""
    unit = store.read(commits.of_attempt, attempt_id)
    if unit is not None:
        land_unit(store, settings, unit)


def land_unit(store: Store, settings: Settings, unit: UnitFiles) -> None:
    """Land one unit, unless all consumers have received it meanwhile. Raises WriteFailed."""
    try:
        move_into_dataset(settings, unit)
    except WriteFailed:
        if store.read(commits.of_attempt, unit.attempt_id) is not None:
            raise


def remove_stored(store: Store, settings: Settings, job_id: str) -> None:
    """Remove the local shards of stored units, if their job does not keep them. Raises OSError."""
    remove_paths(settings, job_id, store.read(commits.gone_shards, job_id))


def remove_paths(settings: Settings, job_id: str, paths: Iterable[str]) -> None:
    """Remove files of a dataset, if they exist. Raises OSError."""
    for path in paths:
        (settings.dataset_dir(job_id) / path).unlink(missing_ok=True)
