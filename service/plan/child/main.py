"""What runs in a child: one task and its answer, then the end of the process.

A message to the parent is a line of JSON, a list whose first item is its kind, and then bytes. Only the task
is pickled: a child trusts its parent, and its parent trusts nothing that a child says.
"""

import json
import mmap
import resource
import signal
import sys
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path

from service.errors import QuarryError, problem_slug
from service.plan.child.task import PROGRESS, Limits, Step, TemplateCheck, Tokenization
from service.plan.rendering import ChatTemplate
from service.plan.samples import SampleTokenizer
from service.plan.sources import RowReject
from service.plan.units import Tokenized

BATCH_S = 0.1
MAX_ERROR_CHARS = 500
LIBRARY_BYTES = 2**28
"""Address space for libraries that a task still imports, and for stacks."""


def run(connection: Connection, progress: mmap.mmap) -> None:
    """Do the task that `connection` brings, and say how it ended."""
    task, limits = connection.recv()
    _limit_memory(limits)
    parent = _Parent(connection, progress, limits.row_cpu_s)
    try:
        match task:
            case TemplateCheck(template, options):
                parent.note(Step.TEMPLATE)
                ChatTemplate(template, {}, options)
            case Tokenization():
                _tokenize(task, parent)
        parent.send("done")
    except QuarryError as error:
        parent.send("error", problem_slug(type(error)), error.detail, error.field, error.cure)
    except MemoryError:
        parent.send("memory")
    except BaseException as error:
        # A panic of the tokenizer's library is no Exception.
        traceback.print_exc()
        sys.stderr.flush()
        text = f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARS]
        parent.send("crash", isinstance(error, Exception), text)
        raise


def _limit_memory(limits: Limits) -> None:
    """Limit what the task may take beyond what the libraries take already."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    address_space = pages * resource.getpagesize() + limits.memory_bytes + LIBRARY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (address_space, address_space))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


class _Parent:
    """The way to the parent, and what it must know of a child that the kernel ends."""

    def __init__(self, connection: Connection, progress: mmap.mmap, row_cpu_s: float) -> None:
        self._connection = connection
        self._progress = progress
        self._row_cpu_s = row_cpu_s
        self._position = -1
        self.begin_row(-1)

    def send(self, kind: str, *values: object, body: bytes = b"") -> None:
        """Send one message; blocks until the parent took enough."""
        self._connection.send_bytes(json.dumps([kind, *values]).encode() + b"\n" + body)

    def begin_row(self, position: int) -> None:
        """Have the kernel kill this process where the row takes too much CPU time."""
        signal.setitimer(signal.ITIMER_PROF, self._row_cpu_s)
        self._position = position
        self.note(Step.START if position < 0 else Step.SOURCE)

    def note(self, step: Step) -> None:
        """Note what begins."""
        PROGRESS.pack_into(self._progress, 0, self._position, step)


def _tokenize(task: Tokenization, parent: _Parent) -> None:
    """Tokenize the rows one by one, in order. Raises what the source and the template raise."""
    tokenizer = SampleTokenizer(task.target, task.request, parent.note)
    parent.send("ready", tokenizer.template_sha256)
    rows: list[tuple[str, Tokenized | RowReject]] = []
    sent_s = time.monotonic()
    parent.begin_row(0)
    for position, row in enumerate(task.source.rows()):
        parent.note(Step.TEMPLATE)
        result = row.content if isinstance(row.content, RowReject) else tokenizer.encode(row.content)
        rows.append((row.source_id, result))
        if time.monotonic() - sent_s > BATCH_S:
            _send_rows(rows, parent)
            rows, sent_s = [], time.monotonic()
        parent.begin_row(position + 1)
    _send_rows(rows, parent)


def _send_rows(rows: list[tuple[str, Tokenized | RowReject]], parent: _Parent) -> None:
    """Send rows as JSON, and the tokens' int32 ids and uint8 masks one after another."""
    entries: list[list[str | int]] = []
    parts: list[bytes] = []
    for source_id, result in rows:
        if isinstance(result, RowReject):
            entries.append([source_id, result.reason, result.detail])
        else:
            entries.append([source_id, len(result.ids)])
            parts += (result.ids.astype("<i4").tobytes(), result.mask.tobytes())
    parent.send("rows", entries, body=b"".join(parts))
