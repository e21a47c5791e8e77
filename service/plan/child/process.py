"""The parent's side of a child: what it sends and accepts, and when it kills.

A time limit never rejects a row, since planning again must give the same bytes. Instead the child is killed,
and its plan fails with an error that names the row.
"""

import json
import re
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any, NoReturn, TypeGuard

import numpy as np
import numpy.typing as npt
from pydantic import TypeAdapter, ValidationError

from schemas.dataset.columns import CONTENT_HASH_BYTES
from schemas.request import ExtractRequest
from schemas.source import MAX_SAMPLE_TOKENS
from service.artifacts.hub_client import LONGEST_WAIT_S
from service.errors import (
    DiskFull,
    HubUnavailable,
    OptionRefused,
    PlanningDied,
    QuarryError,
    SourceRefused,
    TemplateRefused,
    UnknownLayer,
    UnknownModel,
    problem_slug,
)
from service.lifeline import FAULTS
from service.plan.child.fork_server import FORK_SERVER
from service.plan.child.task import MAX_ROWS_BYTES, PROGRESS, Limits, Purpose, Step, Task
from service.plan.model_config import ModelConfig
from service.plan.model_folder import ModelFolder, weight_roots_of
from service.plan.sources import RejectReason, RowReject, RowSource
from service.plan.units import Dialogue, RowOutcome, Tokenized
from service.settings import Settings

WATCH_S = 0.05
STATUS_S = 5.0
START_S = 60.0
"""The first child waits for the server's imports."""
MAX_ANSWER_BYTES = 2**18
"""Maximum size of the answer to a check, which is at most an error."""
CHECK_CPU_S, CHECK_S = 5.0, 15.0
"""Limits for checking a submitted request, which takes milliseconds, or some seconds if a source is a folder
of a hundred thousand files.
"""
CHECKERS: "deque[Child]" = deque()
"""Idle children for further checks: a fork takes twenty times as long as a check."""
CHECKS_EACH = 100
"""Maximum number of requests that one child checks."""
CONFIG = TypeAdapter(ModelConfig)
MODEL_FILES = {Step.CONFIG: "config.json", Step.TOKENIZER: "tokenizer.json"}
SOURCE_FIELDS = {"file": "source.path", "hub": "source.repo_id", "mix": "source.sources"}
ERRORS: tuple[type[QuarryError], ...] = (
    *(UnknownModel, UnknownLayer, SourceRefused, TemplateRefused, OptionRefused, DiskFull, HubUnavailable),
)
RELAYED = {problem_slug(kind): kind for kind in ERRORS}
"""The errors that a child may report."""
REASONS = frozenset(RejectReason)
HASH_FORM, NO_HASH = re.compile(rf"[0-9a-f]{{{2 * CONTENT_HASH_BYTES}}}"), re.compile("")


@dataclass(frozen=True, slots=True)
class Opening:
    """What a child reports before the first row.

    `source` is the result of `RowSource.frozen`. `fingerprint` is the source's, None unless it was requested.
    """

    config: ModelConfig
    template_sha256: str | None
    source: object
    fingerprint: str | None


def check_named(
    request: ExtractRequest, located: ModelFolder | None, source: RowSource | None, settings: Settings
) -> None:
    """Check in a child what a request names (`Purpose.CHECK`); the arguments are those of `Task`.

    Raises UnknownModel, UnknownLayer, OptionRefused, SourceRefused, TemplateRefused, PlanningDied.
    """
    task = Task(Purpose.CHECK, request, located, settings.model_roots, weight_roots_of(settings), source)
    limits = Limits(
        settings.plan_memory_bytes,
        min(CHECK_CPU_S, settings.plan_row_cpu_s),
        min(CHECK_S, settings.plan_silence_s),
    )
    child = _checker(task, limits)
    try:
        child.checked()
    finally:
        if child.is_waiting:
            CHECKERS.append(child)
        else:
            child.close()


def _checker(task: Task, limits: Limits) -> "Child":
    """Return a child that has started the check. Raises PlanningDied."""
    with suppress(IndexError):
        while True:
            child = CHECKERS.pop()
            if child.is_waiting and child.limits == limits:
                child.begin(task)
                return child
            child.close()
    return Child(task, limits)


class Child:
    """One child, which must be closed. Not thread-safe.

    `watch` is called about every `WATCH_S` while waiting for the child; if it raises, the wait ends. Every
    method raises the error that the child reported; TemplateRefused, UnknownModel or SourceRefused if
    template, tokenizer or source exceeded a limit or crashed the process; PlanningDied if it ended for
    another reason.
    """

    def __init__(self, task: Task, limits: Limits, watch: Callable[[], None] = lambda: None) -> None:
        """Start the child and send its task."""
        self.limits = limits
        self._watch = watch
        self._num_tasks = 0
        try:
            self._talk, self._life, self._progress = FORK_SERVER.start_child()
        except OSError as error:
            raise _died(str(error)) from error
        self.begin(task)

    def begin(self, task: Task) -> None:
        """Send a task; a child that checks requests accepts another when it `is_waiting`."""
        self._task = task
        self._num_tasks += 1
        self._has_ended = False
        self._beats = -1
        self._row_s = time.monotonic()
        with suppress(BrokenPipeError):  # noticed when waiting for the answer
            self._talk.send((task, self.limits))

    @property
    def is_waiting(self) -> bool:
        """Return whether it has finished a check and may start another."""
        return self._has_ended and self._num_tasks < CHECKS_EACH and not self._life.poll()

    def close(self) -> None:
        """Kill it if it is alive."""
        self._talk.close()
        self._life.close()

    def opening(self) -> Opening:
        """Wait until config, tokenizer and template are loaded and the source is found."""
        answer, _ = self._answer()
        match answer:
            case ["opened", config, str() | None as template_sha256, source, str() | None as fingerprint]:
                with suppress(ValidationError):
                    return Opening(CONFIG.validate_python(config), template_sha256, source, fingerprint)
        raise _unexpected(answer)

    def checked(self) -> None:
        """Wait until a check is done."""
        answer, _ = self._answer()
        if answer != ["done"]:
            raise _unexpected(answer)
        self._has_ended = True

    def ask(self, *question: object) -> tuple[object, bytes]:
        """Return a `TURNS` child's answer and the bytes that follow it (`service.plan.child.turns`)."""
        self._row_s = time.monotonic()  # it has waited for this
        with suppress(OSError):  # that it ended is seen below
            self._talk.send(question)
        return self._answer()

    def rows(self, known: Path | None = None) -> Iterator[RowOutcome]:
        """Yield the outcomes of the job's rows, in order; `known` is a file of sample hashes to skip."""
        request = self._task.request
        positions = request.positions()
        with suppress(OSError):  # that it ended is seen below
            self._talk.send(known)
        self._row_s = time.monotonic()  # it has waited for this
        while True:
            answer, body = self._answer()
            match answer:
                case ["rows", list(entries)]:
                    yield from _unpacked(entries, body, positions, request, keyed=known is not None)
                case ["done"]:
                    # With `known` there may be no new rows, and a later part may have no rows.
                    if known is None and next(positions) == 0:
                        field = SOURCE_FIELDS.get(request.source.kind, "source")
                        cure = "give a source with at least one row"
                        raise SourceRefused("the source holds no row", field=field, cure=cure)
                    return
                case _:
                    raise _unexpected(answer)

    def _answer(self) -> tuple[object, bytes]:
        """Return the next message and the bytes that follow it; raise a reported error."""
        try:
            head, _, body = self._message().partition(b"\n")
            answer = json.loads(head)
        except (ValueError, RecursionError) as error:
            raise _died(f"{type(error).__name__}: {error}") from error
        match answer:
            case ["error", str(slug), str(detail), str() | None as field, str() | None as cure, *waits]:
                self._has_ended = True
                met = RELAYED.get(slug, QuarryError)(detail, field=field, cure=cure)
                match waits:
                    case [float(wait_s)] if 0.0 <= wait_s <= LONGEST_WAIT_S:
                        met.wait_s = wait_s
                raise met
            case ["memory"]:
                taken = f"took more than {self.limits.memory_bytes} bytes of memory"
                self._blame(taken, "QUARRY_PLAN_MEMORY_BYTES")
            case ["crash", False, str(text)]:
                self._blame(f"breaks: {text}")
            case ["crash", True, str(text)]:
                raise QuarryError(f"internal error: {text}", cure="look for the traceback in the log")
        return answer, body

    def _message(self) -> bytes:
        """Return the child's next message, watching the child meanwhile."""
        ready = False
        while not ready:
            self._watch()  # may take long: another job may be planned meanwhile
            ready = self._talk.poll(WATCH_S)
            _, _, beats = PROGRESS.unpack_from(self._progress)
            if beats != self._beats:
                self._beats, self._row_s = beats, time.monotonic()
            bound_s = self.limits.silence_s if beats else max(START_S, self.limits.silence_s)
            if not ready and time.monotonic() - self._row_s > bound_s:
                self._blame(f"did not go on for {bound_s:g} s", "QUARRY_PLAN_SILENCE_S")
        try:
            is_check = self._task.purpose is Purpose.CHECK
            return self._talk.recv_bytes(MAX_ANSWER_BYTES if is_check else MAX_ROWS_BYTES)
        except (EOFError, ConnectionResetError):
            self._ended()
        except OSError as error:
            raise _died(f"it sends no whole message: {error}") from error

    def _ended(self) -> NoReturn:
        """Raise the error for a child that ended without a message."""
        try:
            code = int(self._life.recv_bytes()) if self._life.poll(STATUS_S) else 0
        except (EOFError, ConnectionResetError) as error:
            raise _died("its keeper ended") from error
        if code == -signal.SIGPROF:
            self._blame(f"took more than {self.limits.row_cpu_s:g} s of CPU time", "QUARRY_PLAN_ROW_CPU_S")
        if -code in FAULTS:
            self._blame(f"ended its process ({signal.Signals(-code).name})", "QUARRY_PLAN_MEMORY_BYTES")
        raise _died(f"its exit code is {code}")

    def _blame(self, why: str, setting: str | None = None) -> NoReturn:
        """Raise an error that names what the child was working on."""
        cure = f", or raise {setting}" if setting else ""
        position, step, _ = PROGRESS.unpack_from(self._progress)
        where = f" at row {position} of the source (the first is 0)" if position >= 0 else ""
        if step == Step.TEMPLATE:
            detail = f"the chat template {why}{where}"
            raise TemplateRefused(detail, field="chat_template", cure=f"fix its loops{cure}")
        request = self._task.request
        if step in MODEL_FILES:
            what = MODEL_FILES[Step(step)]
            cure = f"give a model whose {what} is whole{cure}"
            detail = f"the {what} of {request.model!r} {why}{where}"
            raise UnknownModel(detail, field="model", cure=cure)
        if step != Step.SOURCE:
            raise _died(why)
        field = SOURCE_FIELDS.get(request.source.kind, "source")
        fix = "fix that row" if position >= 0 else "name fewer files"
        raise SourceRefused(f"the source {why}{where}", field=field, cure=f"{fix}{cure}")


def tokenizing(task: Task, settings: Settings, watch: Callable[[], None]) -> closing[Child]:
    """Return a child that tokenizes the rows of a source."""
    limits = Limits(settings.plan_memory_bytes, settings.plan_row_cpu_s, settings.plan_silence_s)
    return closing(Child(task, limits, watch))


def _died(why: str) -> PlanningDied:
    cure = "look into the log, and into the kernel's for a lack of memory"
    return PlanningDied(f"the process that tokenizes ended: {why}", cure=cure)


def _unexpected(answer: object) -> PlanningDied:
    return _died(f"an unexpected message: {answer!r:.200}")


def _unpacked(
    entries: list[object], body: bytes, positions: Iterator[int], request: ExtractRequest, *, keyed: bool
) -> Iterator[RowOutcome]:
    """Unpack the child's rows, checking each. Raises PlanningDied."""
    key_form = HASH_FORM if keyed else NO_HASH
    names = request.label_names
    in_dialogues = request.generate is not None and request.generate.is_rendered_again
    parts, position = BytesIO(body), -1
    for entry in entries:
        match entry:
            case None if keyed:
                yield RowOutcome(next(positions), "", None)
            case [str(source_id), str(reason), str(detail)] if reason in REASONS:
                yield RowOutcome(next(positions), source_id, RowReject(RejectReason(reason), detail))
            case [str(source_id), int(length), str(key), *rest] if length > 0 and key_form.fullmatch(key):
                row = Tokenized(
                    _array(parts, np.dtype("<i4"), length), _array(parts, np.dtype(np.uint8), length)
                )
                if in_dialogues:
                    row = replace(row, dialogue=_dialogue(rest.pop() if rest else None, parts))
                if not _are_labels(rest, names):
                    raise _unexpected(entry)
                if row.dialogue is None or row.dialogue.turn <= 1:
                    position = next(positions)
                yield RowOutcome(
                    position, source_id, row, bytes.fromhex(key), dict(zip(names, rest, strict=True))
                )
            case _:
                raise _unexpected(entry)


def _array(parts: BytesIO, dtype: np.dtype[Any], length: int) -> npt.NDArray[Any]:
    content = parts.read(dtype.itemsize * length)
    if len(content) < dtype.itemsize * length:
        raise _unexpected(f"{length} values of {len(content)} bytes")
    return np.frombuffer(content, dtype)


def _dialogue(packed: object, parts: BytesIO) -> Dialogue:
    match packed:
        case [str(document), int(turn), int(most_tokens), list(lengths), str(why)] if (
            turn >= 0
            and 0 < most_tokens <= MAX_SAMPLE_TOKENS
            and all(isinstance(n, int) and n > 0 for n in lengths)
        ):
            segments = tuple(_array(parts, np.dtype("<i4"), length) for length in lengths)
            return Dialogue(document, turn, most_tokens, segments, why)
    raise _unexpected(packed)


def _are_labels(values: list[object], names: Sequence[str]) -> TypeGuard[list[str | None]]:
    return len(values) == len(names) and all(value is None or isinstance(value, str) for value in values)
