"""What runs in the child: one task, its answer in frames, then the end of the process."""

import math
import os
import resource
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

from service.errors import QuarryError, problem_slug
from service.plan.child.progress import Progress, Step
from service.plan.child.watchdog import Limits
from service.plan.child.wire import (
    CRASH,
    DONE,
    ERROR,
    HELLO,
    MEMORY,
    READY,
    ROWS,
    TemplateCheck,
    Tokenization,
    pack_rows,
    receive_task,
    send_frame,
)
from service.plan.rendering import ChatTemplate
from service.plan.samples import SampleTokenizer
from service.plan.sources import RowReject, RowSource
from service.plan.units import RowOutcome

BATCH_ROWS = 256
BATCH_TOKENS = 2**18
BATCH_S = 0.2
MAX_ERROR_CHARS = 500
MAPPED_BYTES = 2**30
"""Address space for libraries and files that are mapped and hold no memory of their own."""


def run(connection: socket.socket, progress: Progress) -> None:
    """Do the task that `connection` brings, and say how it ended; raises what nobody foresaw."""
    send_frame(connection, HELLO, os.getpid())
    task, limits = receive_task(connection)
    _limit(limits)
    try:
        match task:
            case TemplateCheck(template):
                progress.step(Step.TEMPLATE)
                ChatTemplate(template, {})
            case Tokenization():
                _tokenize(connection, progress, task)
        send_frame(connection, DONE, None)
    except QuarryError as error:
        part = (problem_slug(type(error)), error.detail, error.field, error.cure)
        send_frame(connection, ERROR, part)
    except MemoryError:
        send_frame(connection, MEMORY, None)
    except BaseException as error:
        # A panic of the tokenizer's library is no Exception.
        traceback.print_exc()
        sys.stderr.flush()
        text = f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARS]
        send_frame(connection, CRASH, [isinstance(error, Exception), text])
        raise


def _limit(limits: Limits) -> None:
    """Limit what the task may take beyond what the libraries take already."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    address_space = pages * resource.getpagesize() + limits.memory_bytes + MAPPED_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (address_space, address_space))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # The parent moves it on with each row that it sees.
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(2 * limits.row_cpu_s) + 1, resource.RLIM_INFINITY))


def _tokenize(connection: socket.socket, progress: Progress, task: Tokenization) -> None:
    tokenizer = SampleTokenizer(task.target, task.request, progress.step)
    send_frame(connection, READY, tokenizer.template_sha256)
    rows: list[RowOutcome] = []
    num_tokens, sent_s = 0, time.monotonic()
    for row in _outcomes(task.source, tokenizer, progress):
        rows.append(row)
        num_tokens += 0 if isinstance(row.result, RowReject) else len(row.result.ids)
        now_s = time.monotonic()
        if len(rows) >= BATCH_ROWS or num_tokens >= BATCH_TOKENS or now_s - sent_s > BATCH_S:
            send_frame(connection, ROWS, *pack_rows(rows))
            rows, num_tokens, sent_s = [], 0, now_s
    send_frame(connection, ROWS, *pack_rows(rows))


def _outcomes(source: RowSource, tokenizer: SampleTokenizer, progress: Progress) -> Iterator[RowOutcome]:
    """Tokenize the rows one by one, in order. Raises what the source and the template raise."""
    rows = source.rows()
    progress.row(Step.SOURCE, 0)
    for row in rows:
        progress.row(Step.TEMPLATE, row.position)
        result = row.content if isinstance(row.content, RowReject) else tokenizer.encode(row.content)
        yield RowOutcome(row.position, row.source_id, result)
        progress.row(Step.SOURCE, row.position + 1)
