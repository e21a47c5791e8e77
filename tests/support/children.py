"""Child processes for tests of those who keep them; whatever happens is waited for in the kernel."""

import json
import os
import select
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Self

from pydantic import SecretStr

from service.settings import Settings

DRAINS = """
import signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
print("ready", flush=True)
while True:
    signal.pause()
"""
"""A child that ends in order when it is asked to."""
IGNORES = """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
while True:
    signal.pause()
"""
"""A child that does not listen."""


def python(code: str) -> list[str]:
    """Return the command that runs `code` in a new interpreter."""
    return [sys.executable, "-c", code]


def settings_environment(settings: Settings, base: Mapping[str, str]) -> dict[str, str]:
    """Return `base` changed so that `Settings()` of a process with that environment equals `settings`."""
    variables = {name: f"QUARRY_{name.upper()}" for name in Settings.model_fields}
    environment = {name: value for name, value in base.items() if name.upper() not in variables.values()}
    for field in settings.model_fields_set:
        value, variable = getattr(settings, field), variables[field]
        if isinstance(value, SecretStr):
            environment[variable] = value.get_secret_value()
        elif isinstance(value, tuple | dict):
            environment[variable] = json.dumps(value, default=str)
        elif value is not None:
            environment[variable] = str(value)
    return environment


def wait_for_end(pid: int) -> None:
    """Return when a process has ended; it may already have. It need not be a child, and is not reaped."""
    try:
        watch = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        select.select([watch], [], [])
    finally:
        os.close(watch)


def children_of(pid: int) -> list[int]:
    """Return the processes that a process started, whichever of its threads did."""
    children = []
    with suppress(FileNotFoundError):  # the process has just ended
        for path in Path("/proc").glob(f"{pid}/task/*/children"):
            with suppress(FileNotFoundError, ProcessLookupError):  # a thread has
                children += [int(number) for number in path.read_text().split()]
    return children


def workers_of(pid: int) -> list[int]:
    """Return the workers that a service started; beside them it has the process that forks its checks."""
    children = [(child, Path(f"/proc/{child}/cmdline").read_bytes()) for child in children_of(pid)]
    return [child for child, command in children if b"\0worker\0" in command]


@dataclass(frozen=True)
class Output:
    """A pipe: children write to `write`, the test reads lines."""

    read: IO[bytes]
    write: IO[bytes]

    @classmethod
    @contextmanager
    def opened(cls) -> Iterator[Self]:
        """Open a pipe for the length of a block."""
        read, write = os.pipe()
        with os.fdopen(read, "rb") as reader, os.fdopen(write, "wb") as writer:
            yield cls(reader, writer)

    def line(self) -> str:
        """Wait for a line and return it."""
        return self.read.readline().decode().strip()
