"""What a child and its parent say to each other: one task down, frames up.

A frame is a kind, the lengths of its two parts, a JSON value, and bytes. The parent checks all of it: a
child that misbehaves can fail its own plan, and do no more.
"""

import json
import pickle
import socket
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from schemas.request import ExtractRequest
from service.plan.child.watchdog import Limits
from service.plan.samples import Tokenized
from service.plan.sources.rows import RejectReason, RowReject, RowSource
from service.plan.target import Target
from service.plan.units import RowOutcome

HELLO, READY, ROWS, ERROR, MEMORY, CRASH, DONE = b"H", b"R", b"B", b"E", b"M", b"C", b"D"
FRAME = struct.Struct("<cII")
MAX_PART_BYTES = 2**29
TASK_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Tokenization:
    """The task to tokenize the rows of a source that was found."""

    request: ExtractRequest
    target: Target
    source: RowSource


@dataclass(frozen=True, slots=True)
class TemplateCheck:
    """The task to compile a chat template."""

    template: str


Task = Tokenization | TemplateCheck


def send_task(connection: socket.socket, task: Task, limits: Limits) -> None:
    """Send the child its task. Only this direction is pickled: the child trusts its parent."""
    data = pickle.dumps((task, limits))
    connection.sendall(TASK_LENGTH.pack(len(data)) + data)


def receive_task(connection: socket.socket) -> tuple[Task, Limits]:
    """Return what the parent sent."""
    with connection.makefile("rb") as stream:
        (length,) = TASK_LENGTH.unpack(stream.read(TASK_LENGTH.size))
        received: tuple[Task, Limits] = pickle.loads(stream.read(length))  # noqa: S301 - from our parent
    return received


class BadFrame(ValueError):
    """The child sent what is no frame."""


def send_frame(connection: socket.socket, kind: bytes, part: object, body: bytes = b"") -> None:
    """Send one frame; blocks until the parent took it."""
    text = json.dumps(part).encode()
    connection.sendall(FRAME.pack(kind, len(text), len(body)) + text + body)


def frame_lengths(header: bytes) -> tuple[bytes, int, int]:
    """Return kind and lengths of a frame from its first bytes. Raises BadFrame."""
    kind, part_bytes, body_bytes = FRAME.unpack(header)
    if max(part_bytes, body_bytes) > MAX_PART_BYTES:
        raise BadFrame("a frame is too long")
    return kind, part_bytes, body_bytes


def pack_rows(rows: Sequence[RowOutcome]) -> tuple[list[list[Any]], bytes]:
    """Return rows as JSON, and the tokens' int32 ids and uint8 masks one after another."""
    entries: list[list[Any]] = []
    parts: list[bytes] = []
    for row in rows:
        if isinstance(row.result, RowReject):
            entries.append([row.position, row.source_id, row.result.reason, row.result.detail])
        else:
            entries.append([row.position, row.source_id, len(row.result.ids)])
            parts += (row.result.ids.astype("<i4").tobytes(), row.result.mask.tobytes())
    return entries, b"".join(parts)


def unpack_rows(entries: object, body: bytes, first: int) -> Iterator[RowOutcome]:
    """Yield what `pack_rows` took; positions must go on from `first`. Raises BadFrame."""
    if not isinstance(entries, list):
        raise BadFrame("rows are no list")
    offset = 0
    for expected, entry in enumerate(entries, first):
        match entry:
            case [int(position), str(source_id), str(reason), str(detail)] if position == expected:
                try:
                    reject = RowReject(RejectReason(reason), detail)
                except ValueError as error:
                    raise BadFrame(f"no reason {reason!r}") from error
                yield RowOutcome(position, source_id, reject)
            case [int(position), str(source_id), int(length)] if position == expected:
                end = offset + 5 * length
                if length < 0 or end > len(body):
                    raise BadFrame("a row has more tokens than were sent")
                ids = np.frombuffer(body, "<i4", length, offset)
                mask = np.frombuffer(body, np.uint8, length, offset + 4 * length)
                yield RowOutcome(position, source_id, Tokenized(ids, mask))
                offset = end
            case _:
                raise BadFrame(f"row {expected} is not as expected")
