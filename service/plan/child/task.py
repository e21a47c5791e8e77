"""What a child is asked to do, and within which limits."""

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
"""What a child notes in shared memory, since it cannot be asked once it is frozen: a row's position, which is
-1 before the first row, a step, and a number that grows whenever it got on."""


class Step(IntEnum):
    """Which of the untrusted things runs; each row begins with its source."""

    START = 0
    CONFIG = 1
    TOKENIZER = 2
    TEMPLATE = 3
    SOURCE = 4


class Purpose(Enum):
    """How far a task goes: `CHECK` loads no tokenizer and reads no rows, `PLAN` takes a fingerprint too.

    `TURNS` reads no source, and answers questions about conversations until its parent hangs up.
    """

    CHECK = auto()
    ESTIMATE = auto()
    PLAN = auto()
    TURNS = auto()


@dataclass(frozen=True, slots=True)
class Limits:
    """What a child may take: memory beyond that of the libraries, and time for one row.

    Everything before the first row counts as one row, but for the bytes of a fingerprint.
    """

    memory_bytes: int
    row_cpu_s: float
    silence_s: float


@dataclass(frozen=True, slots=True)
class RowTask:
    """The task to show row `row` of a shard; its text with the tokenizer of `model`, if that is the job's."""

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
    """The task to read what strangers wrote of a request: config, tokenizer, template, and the source's rows.

    `located` is null for a local model that is not looked for yet; it lies below one of `model_roots`. The
    files of `source` are not listed yet; it is null where it has nothing to look at.
    """

    purpose: Purpose
    request: ExtractRequest
    located: ModelFolder | None
    model_roots: tuple[Path, ...]
    source: RowSource | None
