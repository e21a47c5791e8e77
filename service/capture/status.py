"""The status that a capturing worker writes to its row."""

import os
from collections.abc import Sequence
from importlib.metadata import version

from schemas.worker import WorkerStatus
from service.capture.session import EngineSession
from service.settings import Settings
from service.store import UnitLease


def status(settings: Settings, session: EngineSession | None, leases: Sequence[UnitLease]) -> WorkerStatus:
    """Return the status of a worker that holds these units, with or without an engine."""
    engine = None if session is None else session.engine.info.title
    return WorkerStatus(
        version=version("eagle-quarry"),
        roles=settings.roles,
        engine=engine,
        devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
        model=leases[-1].model if leases else None,
        job=leases[-1].job_id if leases else None,
        units=len(leases),
        scratch_bytes=settings.scratch_bytes,
    )
