"""Cuts tokenized rows into units of about one shard each. Pure functions; one unit is held in memory."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from schemas.job import RejectView
from schemas.request import Duplicates
from service.plan.sources.rows import RejectReason, RowReject

Ids = npt.NDArray[np.int32]
Mask = npt.NDArray[np.uint8]
Labels = Mapping[str, str | None]
"""A sample's values in the columns that a request names in `labels`."""


@dataclass(frozen=True, slots=True)
class Dialogue:
    """The continuation of a prompt that the target answers in several turns.

    `document` is JSON with the source's messages and tools (`service.plan.dialogues`). `turn` is 0 if one row
    holds all turns, with `segments`, int32 `[T]`, between answers. Otherwise the row is of that turn only,
    counted from 1, and its planned tokens are the beginning of its prompt that is certain. The row has at
    most about `most_tokens`, since the text of an answer may have more tokens in a later prompt. `why` says
    why the conversation is not one row.
    """

    document: str
    turn: int
    most_tokens: int
    segments: tuple[Ids, ...]
    why: str = ""


@dataclass(frozen=True, slots=True)
class Tokenized:
    """A tokenized row: `ids` int32 `[T]`; `mask` uint8 `[T]`, 1 where the token is supervised."""

    ids: Ids
    mask: Mask
    dialogue: Dialogue | None = None


@dataclass(frozen=True, slots=True)
class RowOutcome:
    """The outcome of row `position` of the source; `result` is None if an earlier run has written it.

    `content_hash` is set in a schedule's job.
    """

    position: int
    source_id: str
    result: Tokenized | RowReject | None
    content_hash: bytes = b""
    labels: Labels = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PlannedSample:
    """A sample of a unit. `ids` int32 `[T]`, `mask` uint8 `[T]`; all T tokens are prompt."""

    position: int
    sample_id: str
    source_id: str
    ids: Ids
    mask: Mask
    content_hash: bytes = b""
    labels: Labels = field(default_factory=dict)
    dialogue: Dialogue | None = None
    most_tokens: int = 0
    """The maximum length including answers."""

    @property
    def prompt_tokens(self) -> int:
        """The number of prompt tokens, T."""
        return len(self.ids)


@dataclass(frozen=True, slots=True)
class UnitDraft:
    """A unit's samples in source order, and the rejects and known rows since the previous draft.

    Without samples, it is the last draft, or it has `DRAFT_REJECTS` rejects.
    """

    samples: tuple[PlannedSample, ...]
    rejects: tuple[RejectView, ...]
    known: int = 0

    @property
    def num_tokens(self) -> int:
        """The number of prompt tokens of all samples."""
        return sum(sample.prompt_tokens for sample in self.samples)


DRAFT_REJECTS = 10_000
"""How many rejects are held until they are written without a unit. A plan that is made again must have the
same drafts.
"""
TALK_UNITS = 8
"""How many units' worth of bytes one conversation may take with answers of maximum length."""


@dataclass(frozen=True, slots=True)
class UnitBounds:
    """When a unit is full, and which samples are excluded.

    A sample that alone exceeds `unit_bytes` has a unit to itself. If each turn of a conversation is a row,
    they are all in one unit and may take `TALK_UNITS` times its size; turns beyond that are rejected.

    `bytes_per_token` is the size of one token's states; `answer_tokens` is the maximum by which each sample
    may grow.
    """

    bytes_per_token: int
    unit_bytes: int
    max_samples: int
    answer_tokens: int = 0
    duplicates: Duplicates = "same_id_and_tokens"


def plan_units(
    outcomes: Iterable[RowOutcome], bounds: UnitBounds, is_new: Callable[[bytes], bool]
) -> Iterator[UnitDraft]:
    """Cut the rows into units, in order: equal rows give equal units.

    Each row ends in exactly one place, a unit or its rejects, or is counted as known. A sample is rejected as
    a duplicate if `is_new` returns False for its 16-byte hash. Rejects need not wait for a unit to be full.
    """
    samples: list[PlannedSample] = []
    rejects: list[RejectView] = []
    filled_bytes = talk_bytes = known = 0
    for row in outcomes:
        if len(rejects) >= DRAFT_REJECTS:
            yield UnitDraft((), tuple(rejects), known)
            rejects, known = [], 0
        if row.result is None:
            known += 1
            continue
        if isinstance(row.result, RowReject):
            rejects.append(_rejected(row, row.result, None))
            continue
        dialogue = row.result.dialogue
        most_tokens = dialogue.most_tokens if dialogue else len(row.result.ids) + bounds.answer_tokens
        num_bytes = most_tokens * bounds.bytes_per_token
        goes_on = dialogue is not None and dialogue.turn > 1  # its answers include those of the rows before
        talk_bytes = talk_bytes + num_bytes if goes_on else num_bytes
        if goes_on and talk_bytes > TALK_UNITS * bounds.unit_bytes:
            detail = "it and the turns before it, each a row, are too large: raise 'storage.shard_bytes'"
            rejects.append(_rejected(row, RowReject(RejectReason.TOO_LONG, detail), None))
            continue
        digest = sample_digest(row.source_id, row.result)
        by_tokens = bounds.duplicates == "same_tokens"
        content = sample_digest("", row.result) if by_tokens else digest
        if not is_new(content):
            detail = "a sample with" if by_tokens else f"id {row.source_id!r} with"
            duplicate = RowReject(RejectReason.DUPLICATE, f"{detail} the same tokens came before")
            rejects.append(_rejected(row, duplicate, digest.hex()))
            continue
        full = filled_bytes + num_bytes > bounds.unit_bytes or len(samples) >= bounds.max_samples
        if samples and full and not goes_on:
            yield UnitDraft(tuple(samples), tuple(rejects), known)
            samples, rejects, filled_bytes, known = [], [], 0, 0
        sample = PlannedSample(
            position=row.position,
            sample_id=digest.hex(),
            source_id=row.source_id,
            ids=row.result.ids,
            mask=row.result.mask,
            content_hash=row.content_hash,
            labels=row.labels,
            dialogue=dialogue,
            most_tokens=most_tokens,
        )
        samples.append(sample)
        filled_bytes += num_bytes
    if samples or rejects or known:
        yield UnitDraft(tuple(samples), tuple(rejects), known)


def sample_digest(source_id: str, tokenized: Tokenized) -> bytes:
    """Return a sample's id: 16 bytes of blake2b over its source id, int32 little-endian ids and uint8 mask.

    If the target answers in several turns, the dialogue's document and segments follow.
    """
    digest = hashlib.blake2b(digest_size=16)
    dialogue = tokenized.dialogue
    parts = (
        source_id.encode(),
        tokenized.ids.astype("<i4", copy=False).tobytes(),
        tokenized.mask.tobytes(),
        *([] if dialogue is None else [dialogue.document.encode()]),
        *([] if dialogue is None else [ids.astype("<i4", copy=False).tobytes() for ids in dialogue.segments]),
    )
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


def turn_id(source_id: str, result: Tokenized | RowReject) -> str:
    """Return the source id of a row, which includes the turn if each turn is a row."""
    dialogue = result.dialogue if isinstance(result, Tokenized) else None
    return f"{source_id}#turn-{dialogue.turn}" if dialogue is not None and dialogue.turn else source_id


def _rejected(row: RowOutcome, reject: RowReject, sample_id: str | None) -> RejectView:
    dialogue = row.result.dialogue if isinstance(row.result, Tokenized) else None
    return RejectView(
        position=row.position,
        source_id=row.source_id,
        sample_id=sample_id,
        reason=reject.reason,
        detail=reject.detail,
        turn=dialogue.turn if dialogue is not None else 0,
    )
