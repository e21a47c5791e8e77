"""The parent's side of a child: what it sends, what it takes, and when it kills.

A clock never rejects a row, since a plan made again must have the same bytes. Past a limit the child ends,
and its plan fails with an error that names the row.
"""

import json
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, NoReturn, Self

from schemas.request import ExtractRequest
from service.errors import (
    DiskFull,
    HubDenied,
    HubUnavailable,
    OptionRefused,
    PlanningDied,
    QuarryError,
    SourceRefused,
    TemplateRefused,
    UnknownModel,
    problem_slug,
)
from service.plan.child.fork_server import FORK_SERVER
from service.plan.child.progress import Step
from service.plan.child.watchdog import Limits, OverLimit, Watchdog, cpu_exceeded, memory_exceeded
from service.plan.child.wire import (
    CRASH,
    DONE,
    ERROR,
    FRAME,
    HELLO,
    MEMORY,
    READY,
    BadFrame,
    Task,
    TemplateCheck,
    Tokenization,
    frame_lengths,
    send_task,
    unpack_rows,
)
from service.plan.sources import RowSource
from service.plan.target import Target
from service.plan.units import RowOutcome
from service.settings import Settings

WATCH_S = 0.05
RECEIVED_BYTES = 2**20
STATUS_S = 5.0
COMPILE_CPU_S = 5.0
"""For the check of a template when its job is submitted: it compiles in milliseconds."""
CHECKS = threading.BoundedSemaphore(2)
"""Templates that are checked at once."""

SOURCE_FIELDS = {"inline": "source", "file": "source.path", "hub": "source.repo_id"}
RELAYED: dict[str, type[QuarryError]] = {
    problem_slug(kind): kind
    for kind in (
        *(UnknownModel, SourceRefused, TemplateRefused, OptionRefused),
        *(DiskFull, HubDenied, HubUnavailable),
    )
}
"""The errors that a child may end with."""


def check_template(template: str, settings: Settings) -> None:
    """Compile a chat template. Raises TemplateRefused, PlanningDied."""
    limits = Limits(
        settings.plan_memory_bytes, min(COMPILE_CPU_S, settings.plan_row_cpu_s), settings.plan_silence_s
    )
    with CHECKS, Child(TemplateCheck(template), limits) as child:
        child.wait_done()


class Child:
    """One child, alive inside a `with` block and killed at its end. Not thread-safe.

    `watch` is called about every `WATCH_S` while the child is waited for; what it raises ends the wait. Every
    method raises the error that the child met; TemplateRefused, UnknownModel or SourceRefused where template,
    tokenizer or source passed a limit or ended the process; PlanningDied where it ended for another reason.
    """

    def __init__(self, task: Task, limits: Limits, watch: Callable[[], None] = lambda: None) -> None:
        self._task = task
        self._limits = limits
        self._watch = watch
        self._watchdog: Watchdog | None = None
        self._watched_s = 0.0

    def __enter__(self) -> Self:
        """Start it and send its task."""
        self._ends = FORK_SERVER.start_child()
        self._poll = select.poll()
        self._poll.register(self._ends.connection, select.POLLIN)
        try:
            pid, _ = self._next(HELLO)
            self._watchdog = Watchdog(int(pid), self._ends.progress, self._limits)
            send_task(self._ends.connection, self._task, self._limits)
        except (OSError, TypeError, ValueError) as error:
            self._ends.close()
            raise _died(f"{type(error).__name__}: {error}") from error
        except BaseException:
            self._ends.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Kill it if it lives."""
        self._ends.close()

    def wait_done(self) -> None:
        """Wait for the end of a task without rows."""
        self._next(DONE)

    def template_sha256(self) -> str | None:
        """Wait until tokenizer and template are loaded; return the template's digest, if there is one."""
        digest, _ = self._next(READY)
        return None if digest is None else str(digest)

    def rows(self) -> Iterator[RowOutcome]:
        """Yield what became of each row, in order."""
        position = 0
        while True:
            kind, entries, body = self._frame()
            if kind == DONE:
                return
            try:
                for row in unpack_rows(entries, body, position):
                    position = row.position + 1
                    yield row
            except BadFrame as error:
                raise _died(str(error)) from error

    def _next(self, expected: bytes) -> tuple[Any, bytes]:
        kind, part, body = self._frame()
        if kind != expected:
            raise _died(f"a frame {kind!r} in the place of {expected!r}")
        return part, body

    def _frame(self) -> tuple[bytes, Any, bytes]:
        """Return kind and both parts of the next frame; one that tells of an error is raised."""
        try:
            kind, part_bytes, body_bytes = frame_lengths(self._receive(FRAME.size))
            part = json.loads(self._receive(part_bytes))
            body = self._receive(body_bytes)
        except OverLimit as over:
            self._blame_limit(over)
        except (ValueError, RecursionError) as error:
            raise _died(f"{type(error).__name__}: {error}") from error
        match part:
            case [str(slug), str(detail), str() | None as field, str() | None as cure] if kind == ERROR:
                raise RELAYED.get(slug, QuarryError)(detail, field=field, cure=cure)
            case [bool(is_exception), str(text)] if kind == CRASH:
                if is_exception:
                    raise QuarryError(f"internal error: {text}", cure="look for the traceback in the log")
                self._blame(f"breaks: {text}", "")
        if kind == MEMORY:
            self._blame_limit(memory_exceeded(self._limits))
        return kind, part, body

    def _receive(self, num_bytes: int) -> bytes:
        """Return so many bytes of the child's, and look after it meanwhile. Raises OverLimit."""
        received = bytearray()
        while len(received) < num_bytes:
            ready = self._poll.poll(WATCH_S * 1000)
            if time.monotonic() - self._watched_s > WATCH_S:
                self._watch()
                if self._watchdog is not None:
                    self._watchdog.check()
                self._watched_s = time.monotonic()
            if ready:
                try:
                    piece = self._ends.connection.recv(min(num_bytes - len(received), RECEIVED_BYTES))
                except ConnectionResetError:
                    piece = b""
                if not piece:
                    self._ended()
                received += piece
        return bytes(received)

    def _ended(self) -> NoReturn:
        """Raise the error of a child that ended without a word."""
        poll = select.poll()
        poll.register(self._ends.status, select.POLLIN)
        told = os.read(self._ends.status, 16) if poll.poll(STATUS_S * 1000) else b""
        code = int(told or b"0")
        if code == -signal.SIGXCPU:
            raise cpu_exceeded(self._limits)
        if code in {-signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS, -signal.SIGILL, -signal.SIGFPE}:
            name = signal.Signals(-code).name
            self._blame(f"ended its process ({name})", ", or raise QUARRY_PLAN_MEMORY_BYTES")
        raise _died(f"its exit code is {code}" if told else "its server ended")

    def _blame_limit(self, over: OverLimit) -> NoReturn:
        self._blame(str(over), f", or raise {over.setting}")

    def _blame(self, why: str, cure: str) -> NoReturn:
        """Raise an error that names what the child was busy with."""
        position, step = self._ends.progress.read()
        where = f" at row {position} of the source (the first is 0)" if position >= 0 else ""
        if step == Step.TEMPLATE:
            raise TemplateRefused(
                f"the chat template {why}{where}", field="chat_template", cure=f"mend its loops{cure}"
            )
        match self._task:
            case Tokenization(request) if step == Step.TOKENIZER:
                detail = f"the tokenizer of {request.model!r} {why}{where}"
                cure = f"give a model whose tokenizer.json is whole{cure}"
                raise UnknownModel(detail, field="model", cure=cure)
            case Tokenization(request) if step == Step.SOURCE:
                field = SOURCE_FIELDS[request.source.kind]
                raise SourceRefused(f"the source {why}{where}", field=field, cure=f"mend that row{cure}")
        raise _died(why)


def tokenizing(
    request: ExtractRequest, target: Target, source: RowSource, settings: Settings, watch: Callable[[], None]
) -> Child:
    """Return a child that tokenizes the rows of `source`."""
    limits = Limits(settings.plan_memory_bytes, settings.plan_row_cpu_s, settings.plan_silence_s)
    return Child(Tokenization(request, target, source), limits, watch)


def _died(why: str) -> PlanningDied:
    return PlanningDied(
        f"the process that tokenizes ended: {why}",
        cure="look into the log, and into the kernel's for a lack of memory",
    )
