"""The engine and what its first unit needs, imported: seconds, which no start of a worker waits for."""

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
"""What an import raises of a package that is half there, or of a library that is cut or of another build."""


def import_engine(settings: Settings) -> None:
    """Import what an engine and its first unit need; takes seconds once, so call it from a thread.

    Raises EngineDied where they cannot be imported: that is no job's fault.
    """
    # One order for every caller: two threads then never wait for each other.
    try:
        resolve_name(settings.engine)
        importlib.import_module("service.capture.canary")
        importlib.import_module("service.capture.unit_run")
    except BROKEN_INSTALL as error:
        cure = "mend the installation, then restart the worker"
        raise EngineDied(f"the engine cannot be imported: {error!r}", cure=cure) from error
