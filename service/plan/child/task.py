"""The tasks of a child, and their limits."""

import struct
from dataclasses import dataclass
from enum import Enum, IntEnum, auto
from pathlib import Path

from schemas.base import Wire
from schemas.identity import Identity
from schemas.request import ExtractRequest
from service.plan.model_folder import ModelFolder
from service.plan.sources.rows import RowSource
from service.report.sample_text import Token

PROGRESS = struct.Struct("<qqq")
"""A child's progress in shared memory, since a hung child cannot be asked: the row's position (-1 before the
first row), the step, and a counter that grows whenever it makes progress.
"""

MAX_ROWS_BYTES = 2**26
"""Maximum size of a message of rows, six times what a row of 2 million tokens takes."""


class Step(IntEnum):
    """Which untrusted input is being processed; each row begins with its source."""

    START = 0
    CONFIG = 1
    TOKENIZER = 2
    TEMPLATE = 3
    SOURCE = 4


class Purpose(Enum):
    """How far a task goes: `CHECK` loads no tokenizer and reads no rows; `PLAN` also takes a fingerprint.

    `TURNS` reads no source; it answers questions about conversations until its parent hangs up.
    """

    CHECK = auto()
    ESTIMATE = auto()
    PLAN = auto()
    TURNS = auto()


@dataclass(frozen=True, slots=True)
class Limits:
    """A child's limits: memory beyond that of the libraries, and time for one row.

    Everything before the first row counts as one row, except reading for the fingerprint.
    """

    memory_bytes: int
    row_cpu_s: float
    silence_s: float


@dataclass(frozen=True, slots=True)
class RowTask:
    """The task of showing row `row` of a shard, with its text if `model`'s tokenizer is still the job's."""

    file: Path
    row: int
    model: str
    model_roots: tuple[Path, ...]
    identity: Identity


class ShownRow(Wire):
    """A row; of a long one the first and the last tokens. `no_text` says why only ids are known.

    `rms` has the root mean square of the states of each layer, a value for every `step` tokens.
    """

    sample_id: str
    source_id: str | None
    num_tokens: int
    prompt_tokens: int
    supervised: int
    tokens: tuple[Token, ...]
    no_text: str | None
    rms: dict[int, tuple[float, ...]]
    step: int


@dataclass(frozen=True, slots=True)
class Task:
    """The task of reading a request's untrusted inputs: config, tokenizer, template, and the source's rows.

    `located` is None for a local model that is not located yet. It must be below one of `model_roots`; links
    to its weights must lead into it, or below one of `weight_roots` if these are given. The files of `source`
    are not listed yet; it is None if there is nothing to read.
    """

    purpose: Purpose
    request: ExtractRequest
    located: ModelFolder | None
    model_roots: tuple[Path, ...]
    weight_roots: tuple[Path, ...] | None
    source: RowSource | None
