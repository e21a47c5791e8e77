"""Whose fault it is that a unit was not captured: the worker's, or else the unit's and so the job's.

What an attempt says of its own machine is the worker's fault: an engine that dies, scratch that cannot be
written, a setting or a job that the engine refuses, an engine that the job was not begun with, and wrong
states, until another worker's engine gets them wrong, or a new engine of the only worker.
"""

from contextlib import suppress

from service.capture.held import HeldUnit
from service.capture.session import EngineSession
from service.errors import (
    DiskFull,
    EngineDied,
    LeaseLost,
    NotFound,
    QuarryError,
    StatesNotFinite,
    StatesWrong,
    WriteFailed,
)
from service.settings import Settings
from service.store import HOME, Store, UnitLease, commits, workers


def is_the_workers(unit: HeldUnit, error: QuarryError) -> bool:
    """Say whether an error is the worker's. The data folder's disk is everybody's, scratch its machine's.

    Scratch is not written during a commit: a disk that is full then is the database's.
    """
    is_scratch = unit.lease.host != HOME and not unit.commits
    is_disks = is_scratch and isinstance(error, WriteFailed | DiskFull)
    return is_disks or isinstance(error, EngineDied | StatesWrong)


def charge(store: Store, settings: Settings, unit: HeldUnit, error: QuarryError) -> None:
    """Give a unit back whose worker failed, and block what no worker takes any more.

    If the store is away meanwhile, it may be called again.
    """
    # Rows that are not finite are rejected by name in the end: no unit is at fault for them.
    is_blamed = unit.alone and isinstance(error, EngineDied) and not isinstance(error, StatesNotFinite)
    lone = unit.session if is_blamed else None
    how = {"alone": lone is not None, "sound": lone is not None and lone.has_captured}
    with suppress(LeaseLost):  # also if the answer to an earlier call was lost
        store.write(workers.engine_died, unit.lease, error, settings.engine_rest_s, **how)
    for sickness in store.read(workers.untaken, unit.lease.identity.model_sha256()):
        with suppress(NotFound):  # it was deleted meanwhile
            store.write(workers.block, sickness)


def refuse_other_engine(lease: UnitLease, session: EngineSession) -> None:
    """Raise EngineChanged where a unit's job was begun with another engine than this worker's."""
    was, now = lease.engine, session.engine.info.title
    if was is not None and was != now:
        raise commits.other_engine(lease.job_id, was, now)
