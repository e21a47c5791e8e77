"""What a child is asked to do, and within which limits."""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from schemas.request import ExtractRequest
from service.plan.sources.rows import RowSource
from service.plan.target import Target

PROGRESS = struct.Struct("<qq")
"""What a child notes in shared memory, since it cannot be asked once it is frozen: a row's position, which is
-1 before the first row, and a step."""


class Step(IntEnum):
    """Which of the untrusted things runs; each row begins with its source."""

    START = 0
    TOKENIZER = 1
    TEMPLATE = 2
    SOURCE = 3


@dataclass(frozen=True, slots=True)
class Limits:
    """What a child may take: memory beyond that of the libraries, and time for one row.

    Everything before the first row counts as one row.
    """

    memory_bytes: int
    row_cpu_s: float
    silence_s: float


@dataclass(frozen=True, slots=True)
class Tokenization:
    """The task to tokenize the rows of a source that may be read."""

    request: ExtractRequest
    target: Target
    source: RowSource


@dataclass(frozen=True, slots=True)
class TemplateCheck:
    """The task to compile a chat template, which must read `options`."""

    template: str
    options: Mapping[str, Any]


Task = Tokenization | TemplateCheck
