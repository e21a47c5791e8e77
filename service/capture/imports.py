"""Imports the engine and what its first unit needs; that takes seconds, so a worker's start does not wait."""

import importlib
from pkgutil import resolve_name

from service.errors import EngineDied
from service.settings import Settings

BROKEN_INSTALL = (
    ImportError,
    OSError,
    RuntimeError,
    SyntaxError,
    NameError,
    AttributeError,
    TypeError,
    ValueError,
)
"""What an import raises if a package is incomplete, or a library is truncated or of another build."""


def import_engine(settings: Settings) -> None:
    """Import what an engine and its first unit need. The first call takes seconds, so call it from a thread.

    Raises EngineDied if they cannot be imported, which is not the job's fault.
    """
    # The same order for every caller, so that two threads never deadlock on import locks.
    try:
        resolve_name(settings.engine)
        importlib.import_module("service.capture.canary")
        importlib.import_module("service.capture.unit_run")
    except BROKEN_INSTALL as error:
        cure = "fix the installation, then restart the worker"
        raise EngineDied(f"the engine cannot be imported: {error!r}", cure=cure) from error
