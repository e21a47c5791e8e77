"""Runs in a child: one task (or several checks) and its answer, then the process ends.

A message to the parent is a line of JSON, a list whose first item is the message's kind, followed by bytes.
Messages from the parent are pickled: a child trusts its parent, but the parent does not trust a child.
"""

import json
import logging
import mmap
import os
import resource
import signal
import time
from collections.abc import Sequence
from dataclasses import fields
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from schemas.generate import MIX_LABEL
from schemas.request import ExtractRequest
from schemas.source import PostedSource, Sample
from service.errors import OptionRefused, QuarryError, problem_slug
from service.plan.child.stored_row import show
from service.plan.child.task import MAX_ROWS_BYTES, PROGRESS, Limits, Purpose, RowTask, Step, Task
from service.plan.content_hashes import KnownHashes, content_hash
from service.plan.model_config import ModelConfig, read_config
from service.plan.model_folder import local_model
from service.plan.rendering import ChatTemplate
from service.plan.samples import SampleTokenizer
from service.plan.sources import RejectReason, RowReject, RowSource, SourceRow
from service.plan.target import Target, target_of
from service.plan.units import RowOutcome, turn_id

logger = logging.getLogger(__name__)

BATCH_S = 0.1
MAX_ERROR_CHARS, MAX_DETAIL_CHARS = 500, 4000
"""Maximum length of the text of a bug, and of an error, which may quote untrusted text."""
ROWS_BYTES = MAX_ROWS_BYTES - 2**10
"""Maximum size of the rows in a message."""
LIBRARY_BYTES = 2**28
"""Address space for libraries that a task imports later, and for stacks."""


def run(connection: Connection, progress: mmap.mmap) -> None:
    """Do the task received on `connection` and report how it ended; after a check, do the next one."""
    task, limits = connection.recv()
    _limit_memory(limits)
    if isinstance(task, RowTask):
        signal.setitimer(signal.ITIMER_PROF, limits.row_cpu_s)
        shown = show(task)
        message = ["error", shown] if isinstance(shown, str) else ["row", shown.model_dump(mode="json")]
        connection.send_bytes(json.dumps(message).encode())
        return
    while True:
        parent = _Parent(connection, progress, limits.row_cpu_s)
        _answer(task, parent)
        if task.purpose is not Purpose.CHECK:
            return
        signal.setitimer(signal.ITIMER_PROF, 0)
        task, limits = parent.received()


def _answer(task: Task, parent: "_Parent") -> None:
    """Do a task and report how it ended."""
    try:
        _work(task, parent)
        parent.send("done")
    except QuarryError as error:
        detail = error.detail[:MAX_DETAIL_CHARS]
        parent.send("error", problem_slug(type(error)), detail, error.field, error.cure, error.wait_s)
    except MemoryError:
        parent.send("memory")
    except BaseException as error:
        # A panic in the tokenizer library is not an Exception.
        logger.exception("a task to plan ends its process")
        text = f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARS]
        parent.send("crash", isinstance(error, Exception), text)
        raise


def _limit_memory(limits: Limits) -> None:
    """Limit the memory that the task may use in addition to what the libraries already use.

    The hard limit is kept, so that the limit can be raised for a file of hashes.
    """
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    address_space = pages * resource.getpagesize() + limits.memory_bytes + LIBRARY_BYTES
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (address_space, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _mapped(path: Path) -> KnownHashes:
    """Map a file of hashes, raising the memory limit by its size."""
    limit, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (limit + path.stat().st_size, most))
    return KnownHashes(path)


class _Parent:
    """The connection to the parent, and the progress that the parent needs if the kernel kills the child."""

    def __init__(self, connection: Connection, progress: mmap.mmap, row_cpu_s: float) -> None:
        self._connection = connection
        self._progress = progress
        self._row_cpu_s = row_cpu_s
        self._beats = 0
        self.begin_row(-1)

    def send(self, kind: str, *values: object, body: bytes = b"") -> None:
        """Send one message; blocks while the parent reads too slowly."""
        self.send_json(json.dumps([kind, *values]), body)

    def send_json(self, message: str, body: bytes) -> None:
        """Send one message whose JSON is made already; end this process if the parent has hung up."""
        try:
            self._connection.send_bytes(message.encode() + b"\n" + body)
        except ConnectionError:
            os._exit(0)  # as where it waits: nothing is wrong, and nobody is there to be told

    def received(self) -> Any:  # noqa: ANN401 - hashes, a question or a task
        """Wait for the parent's next message; end this process if the parent has hung up."""
        try:
            return self._connection.recv()
        except (EOFError, ConnectionError):  # the second if it had not read what was sent
            os._exit(0)

    def begin_row(self, position: int) -> None:
        """Record that a row begins, and restart its time limit."""
        self._position = position
        self.note(Step.START if position < 0 else Step.SOURCE)
        self.go_on()

    def go_on(self) -> None:
        """Restart the CPU time limit, after which the kernel kills this process."""
        signal.setitimer(signal.ITIMER_PROF, self._row_cpu_s)
        self._beats += 1
        self.note(self._step)

    def note(self, step: Step) -> None:
        """Record the step that begins."""
        self._step = step
        PROGRESS.pack_into(self._progress, 0, self._position, step, self._beats)


def _work(task: Task, parent: _Parent) -> None:
    """Read what the task names, as far as its purpose requires. Raises the errors it finds."""
    request = task.request
    parent.note(Step.CONFIG)
    located = task.located or local_model(
        request.model, request.revision, task.model_roots, task.weight_roots
    )
    target = target_of(request, located, read_config(located.folder, request.dtype))
    parent.note(Step.SOURCE)
    source = task.source.listed() if task.source is not None else None
    if task.purpose is Purpose.CHECK:
        parent.note(Step.TEMPLATE)
        if request.chat_template is not None:
            entries = request.generate.mix if request.generate is not None else ()
            for own in ({}, *(entry.chat_template_kwargs for entry in entries)):
                ChatTemplate(request.chat_template, {}, request.chat_template_kwargs | own)
    elif task.purpose is Purpose.TURNS:
        _talk(target, request, parent)
    elif source is not None:
        tokenizer = SampleTokenizer(target, request, parent.note)
        parent.note(Step.SOURCE)
        fingerprint = source.fingerprint(parent.go_on) if task.purpose is Purpose.PLAN else None
        config = {field.name: getattr(target, field.name) for field in fields(ModelConfig)}
        parent.send("opened", config, tokenizer.template_sha256, source.frozen(), fingerprint)
        _tokenize(task, source, tokenizer, parent)


def _talk(target: Target, request: ExtractRequest, parent: _Parent) -> None:
    """Answer questions about conversations until the parent hangs up. Raises as template and parsers do."""
    from service.plan.child.turns import Turns

    assert request.generate is not None, "rows of other jobs are not answered"  # noqa: S101
    tokenizer = SampleTokenizer(target, request, parent.note)
    turns = Turns(tokenizer, request.generate, target.folder)
    config = {field.name: getattr(target, field.name) for field in fields(ModelConfig)}
    parent.send("opened", config, tokenizer.template_sha256, None, None)
    while True:
        parent.note(Step.TEMPLATE)
        question = parent.received()
        parent.go_on()
        kind, values, body = turns.answer(question)
        parent.send(kind, *values, body=body)


def _tokenize(task: Task, source: RowSource, tokenizer: SampleTokenizer, parent: _Parent) -> None:
    """Tokenize the job's rows one by one, in order.

    Raises what the source and the template raise, and OptionRefused (`labels`).
    """
    hashes: Path | None = parent.received()
    known = _mapped(hashes) if hashes is not None else None
    request = task.request

    def outcomes(position: int, row: SourceRow) -> list[RowOutcome]:
        """Tokenize a row if it is a sample and not known; it may become one row per turn."""
        if isinstance(row.content, RowReject):
            return [RowOutcome(position, row.source_id, row.content)]
        content = b""
        if known is not None:
            content = content_hash(row.content)
            if content in known:
                return [RowOutcome(position, row.source_id, None)]
        parent.note(Step.TEMPLATE)
        labels = row.content.labels or {}
        kept = {name: labels.get(name) for name in request.labels}
        if request.generate is not None and (entry := request.generate.drawn(row.source_id)) is not None:
            kept[MIX_LABEL] = entry.name
        return [
            RowOutcome(position, turn_id(row.source_id, result), result, content, kept)
            for result in tokenizer.rows(row.content, row.source_id)
        ]

    batch = _Batch(parent)
    parent.begin_row(0)
    positions = request.positions()
    own = next(positions)
    unseen, any_sample = set(request.labels), False
    for position, row in enumerate(source.rows()):
        if unseen and isinstance(row.content, Sample):
            unseen.difference_update(row.content.labels or ())
            any_sample = True
        if position == own:
            batch.add(row, outcomes(position, row))
            own = next(positions)
        batch.send_if_due()
        parent.begin_row(position + 1)
    source.check_unchanged()
    if unseen and any_sample and not isinstance(request.source, PostedSource):
        detail = f"no sample of the source has the column {', '.join(map(repr, sorted(unseen)))}"
        raise OptionRefused(detail, field="labels", cure="name a column that the rows have, or leave it out")
    batch.send()


class _Batch:
    """Rows for one message: a JSON entry each, then their token ids, masks and segments."""

    def __init__(self, parent: _Parent) -> None:
        self._parent = parent
        self._begin()

    def _begin(self) -> None:
        self._entries: list[str] = []
        self._parts: list[bytes] = []
        self._num_bytes = 0
        self._sent_s = time.monotonic()

    def add(self, row: SourceRow, outcomes: Sequence[RowOutcome]) -> None:
        """Add what became of a row of the source; it is rejected if that is more than a message holds."""
        packed = [_packed(outcome) for outcome in outcomes]
        num_bytes = sum(map(_num_bytes, packed))
        if num_bytes > ROWS_BYTES:
            detail = f"its plan, of {len(outcomes)} rows, takes {num_bytes} bytes; {ROWS_BYTES} are allowed"
            reject = RowReject(RejectReason.TOO_LONG, detail)
            packed = [_packed(RowOutcome(outcomes[0].position, row.source_id, reject))]
            num_bytes = sum(map(_num_bytes, packed))
        if self._num_bytes + num_bytes > ROWS_BYTES:
            self.send()
        self._num_bytes += num_bytes
        for entry, parts in packed:
            self._entries.append(entry)
            self._parts += parts

    def send_if_due(self) -> None:
        """Send the rows if the last were sent some time ago."""
        if time.monotonic() - self._sent_s > BATCH_S:
            self.send()

    def send(self) -> None:
        """Send the rows."""
        self._parent.send_json(f'["rows", [{", ".join(self._entries)}]]', b"".join(self._parts))
        self._begin()


def _packed(row: RowOutcome) -> tuple[str, list[bytes]]:
    """Return a row's JSON, null for a known one, and the bytes that go with it."""
    result = row.result
    if result is None:
        return json.dumps(None), []
    if isinstance(result, RowReject):
        return json.dumps([row.source_id, result.reason, result.detail]), []
    entry: list[object] = [row.source_id, len(result.ids), row.content_hash.hex(), *row.labels.values()]
    parts = [result.ids.astype("<i4").tobytes(), result.mask.tobytes()]
    if (dialogue := result.dialogue) is not None:
        lengths = [len(segment) for segment in dialogue.segments]
        entry.append([dialogue.document, dialogue.turn, dialogue.most_tokens, lengths, dialogue.why])
        parts += [segment.astype("<i4").tobytes() for segment in dialogue.segments]
    return json.dumps(entry), parts


def _num_bytes(packed: tuple[str, list[bytes]]) -> int:
    entry, parts = packed
    return len(entry) + len(", ") + sum(map(len, parts))
