"""One life of a service in a process of its own, in which a file, database or socket call meets a fault.

A life plans, captures, stores and publishes one job on the fake engine, the roles one after another, so that
the n-th call of a role is nearly the same call in every run. It may capture and store on scratch of its own,
as a machine without the data folder does. It runs below `shim.c`, which counts the calls of the process
itself: those of Python, of SQLite, of pyarrow and of the connector's writers alike. Lives are forked from a
server that has imported everything.
"""

import asyncio
import ctypes
import errno
import faulthandler
import multiprocessing
import os
import re
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest
from pydantic import SecretStr

from schemas.job import JobState
from service.artifacts.repository import Patience
from service.settings import Settings
from service.store import Store, jobs
from service.work.task_loop import owner_name
from tests.support.jobs import ENDED
from tests.support.machines import AWAY
from tests.support.roles import Capture, run_planning, run_publishing, run_storing, sweep

IMPORTED = [
    *("pandas", "transformers.models.auto.tokenization_auto", "tests.support.eager_engine"),
    *("service.capture.canary", "service.capture.unit_run"),
]
"""What a life would else import by itself, in seconds; it stores a unit at a time, and waits for no turn."""
SHIM = Path(__file__).with_name("shim.c")
OPERATIONS = (
    *("create", "open", "write", "truncate", "fsync", "rename", "unlink", "rmdir", "mkdir"),
    *("link", "read", "send"),
)
CHANGING = frozenset(OPERATIONS) - {"open", "read"}
"""Before each of these a kill finds another state than before the one ahead of it."""
GROWING = frozenset({"create", "write", "truncate", "fsync", "rename", "mkdir", "link"})
"""What a full disk refuses."""
ON_DISK = frozenset(OPERATIONS) - {"send"}

ACTIONS = {"watch": 0, "EIO": 1, "ENOSPC": 1, "kill": 2, "stop": 3}
MEETS = {
    "watch": frozenset(OPERATIONS),
    "EIO": ON_DISK,
    "ENOSPC": GROWING,
    "kill": CHANGING,
    "stop": CHANGING,
}
HEAD = struct.Struct("iiqqiiii")

COMPLETED, BLOCKED, FAILED = 0, 10, 11
"""How a life ends that was not killed; any other code is an error that ended the process."""
LOOK_S = 0.02


@dataclass(frozen=True)
class Fault:
    """What the `n`-th call of `role`, or of `all` a life, on a file that `pattern` fits meets.

    `watch` only writes calls down.
    """

    role: str
    pattern: str
    kind: str = "watch"
    n: int = 0


@dataclass(frozen=True)
class Call:
    """One call as the shim wrote it down. `hit`: the fault came before it, and what follows is its effect."""

    operation: str
    hit: bool
    path: str
    other: str
    offset: int
    length: int
    data: bytes


def calls(trace: Path) -> Iterator[Call]:
    """Yield the calls of a trace in the order of their effects."""
    content, at = trace.read_bytes(), 0
    while at < len(content):
        operation, hit, offset, length, *sizes, _ = HEAD.unpack_from(content, at)
        at += HEAD.size
        parts = []
        for size in sizes:
            parts.append(content[at : at + size])
            at += size
        path, other = (os.fsdecode(part) for part in parts[:2])
        yield Call(OPERATIONS[operation], bool(hit), path, other, offset, length, parts[2])


def build_shim(folder: Path) -> Path:
    """Compile the shim. Raises CalledProcessError, FileNotFoundError where there is no C compiler."""
    library = folder / "shim.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", library, SHIM], check=True)
    return library


def open_server(library: Path) -> None:
    """Start the server below the shim; this process is not."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, *IMPORTED])
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("LD_PRELOAD", str(library))
        environment.setenv("HF_HUB_DISABLE_XET", "1")  # a push is counted where it is Python's own
        forkserver.ensure_running()


@dataclass(frozen=True)
class Life:
    """A started life."""

    process: ForkServerProcess
    trace: Path

    @classmethod
    def begin(
        cls,
        settings: Settings,
        job_id: str,
        fault: Fault | None = None,
        *,
        data: bool = False,
        away: bool = False,
    ) -> "Life":
        """Start a life of the service of `settings`, whose calls go to a trace, their `data` too if asked.

        One that is `away` captures and stores where `scratch_of` says.
        """
        trace = settings.data_dir.with_suffix(".trace")
        trace.unlink(missing_ok=True)
        context = multiprocessing.get_context("forkserver")
        log = settings.data_dir.with_suffix(".log")
        process = context.Process(target=_live, args=(settings, job_id, fault, trace, log, data, away))
        process.start()
        return cls(process, trace)

    def end(self, patience_s: float = 120.0) -> int:
        """Wait for its end; return its exit status, negative for a signal."""
        self.process.join(patience_s)
        if self.process.exitcode is None:
            self.process.kill()
            said = self.trace.with_suffix(".log").read_text(errors="replace")
            raise AssertionError(f"the life did not end: {said[-8000:]}")
        return self.process.exitcode

    def stopped(self) -> bool:
        """Say whether SIGSTOP has come."""
        return Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(") ", 1)[1][0] == "T"

    def hit(self) -> Call | None:
        """Return the call that met the fault, if there was one."""
        return next((call for call in calls(self.trace) if call.hit), None)


def scratch_of(settings: Settings) -> Settings:
    """Return the settings of a machine that has scratch beside the data folder."""
    there = {"data_dir": settings.data_dir.with_name("scratch"), "roles": AWAY}
    return settings.model_copy(update=there | {"database_url": SecretStr(settings.database())})


def _live(
    settings: Settings, job_id: str, fault: Fault | None, trace: Path, log: Path, data: bool, away: bool
) -> None:
    with log.open("ab") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    faulthandler.dump_traceback_later(100)  # shorter than the patience with a life that hangs
    descriptor = os.open(trace, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    if fault is not None and fault.role == "all":
        _arm(fault, descriptor, data)
    store = Store(settings.database())
    sweep(store, settings)
    machine = settings
    if away:
        machine = scratch_of(settings)
        sweep(store, machine)
    if store.read(jobs.state, job_id) is JobState.BLOCKED:
        store.write(jobs.resume, job_id)  # a person has made space

    roles: dict[str, Callable[[], object]] = {
        "plan": lambda: run_planning(store, settings, owner_name("planner"), lambda: False),
        "capture": lambda: _capture(store, machine, job_id),
        "store": lambda: run_storing(
            store, machine, owner_name("storer"), lambda: False, patience=Patience(attempts=3)
        ),
        "publish": lambda: run_publishing(
            store, settings, owner_name("publisher"), lambda: False, patience=Patience(attempts=3)
        ),
    }
    armed = fault
    while (state := store.read(jobs.state, job_id)) not in ENDED:
        for role, act in roles.items():
            if armed is not None and armed.role == role:
                _arm(armed, descriptor, data)
            act()
            if armed is not None and armed.role == role:
                ctypes.CDLL(None).crash_disarm()
                armed = None
        time.sleep(LOOK_S)
    store.close()
    ctypes.CDLL(None).crash_disarm()
    sys.exit({JobState.COMPLETED: COMPLETED, JobState.BLOCKED: BLOCKED}.get(state, FAILED))


def _capture(store: Store, settings: Settings, job_id: str) -> None:
    if store.read(jobs.job, job_id).progress.plan_done:
        asyncio.run(Capture(store, settings, owner_name("capture"), only_job=job_id).run())


def _arm(fault: Fault, descriptor: int, data: bool) -> None:
    meets = sum(1 << number for number, name in enumerate(OPERATIONS) if name in MEETS[fault.kind])
    number = {"EIO": errno.EIO, "ENOSPC": errno.ENOSPC}.get(fault.kind, 0)
    refused = ctypes.CDLL(None).crash_arm(
        fault.pattern.encode(), meets, ctypes.c_long(fault.n), ACTIONS[fault.kind], number, descriptor, data
    )
    assert not refused, re.escape(fault.pattern)
