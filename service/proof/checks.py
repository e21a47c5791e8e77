"""Checks one sealed attempt against its plan and the engine's log-probabilities, before it is committed.

Imports torch: import it lazily. Everything is read back from the sealed files, not taken from memory.

Legend: T tokens, H hidden size.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set as AbstractSet
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from schemas.dataset.errors import DatasetError
from schemas.dataset.files import DirectReader
from schemas.dataset.index import Witness
from schemas.dataset.manifest import UnitChecks
from schemas.dataset.shard import LightRow, Shard
from schemas.identity import Identity
from schemas.receipts import UnitSealed
from service.errors import EngineDied, StatesWrong, WriteFailed
from service.proof.head import Head
from service.proof.logit_check import LogitCase, check_logits
from service.proof.row_proof import prove_row


@dataclass(frozen=True, slots=True)
class Written:
    """An answered row as it must be stored: `ids` int32 `[T]` and `mask` uint8 `[T]`.

    The stored row may lack the last token: in one pass it has no state.
    """

    ids: NDArray[np.int32]
    mask: NDArray[np.uint8]
    prompt_tokens: int

    @property
    def last_answer(self) -> int:
        """The place of the last answer's first token. In one pass, the answer was computed token by token."""
        return int(np.flatnonzero(np.diff(self.mask, prepend=0) == 1)[-1])


@dataclass(frozen=True, slots=True)
class UnitProof:
    """The proof of a unit: its checks and, by rank, the file's sha256 and its rows without states."""

    checks: UnitChecks
    sha256s: Mapping[int, str]
    rows: Mapping[int, tuple[LightRow, ...]]


def check_unit(
    *,
    attempt: Path,
    plan: pa.Table,
    receipts: Sequence[UnitSealed],
    witnesses: Mapping[int, Witness],
    head: Head,
    identity: Identity,
    skipped: AbstractSet[int] = frozenset(),
    written: Mapping[int, Written] = {},
) -> UnitProof:
    """Check one attempt's sealed files against the unit's plan, the receipts and the engine's witnesses.

    Args:
        attempt: the attempt's folder, which holds the files that the receipts name.
        plan: the unit's frozen samples; a row's number in it is its row everywhere else.
        receipts: every rank's receipt for this attempt.
        witnesses: by plan row; if layer N was captured, each written row needs one.
        head: the model's head, against which rows of layer N are checked.
        identity: the job's; every shard must carry it.
        skipped: plan rows that the service never sent to the engine.
        written: by plan row, the row with the target's answers as it must be stored.

    Raises:
        EngineDied: the engine dropped rows; the unit is retried.
        WriteFailed: a sealed file does not match its receipt; the unit is retried.
        StatesWrong: rows disagree with the plan or the model; the message has both values.
    """
    unit = f"unit {receipts[0].attempt_id.unit}"
    _account(unit, plan.num_rows, receipts, skipped)
    cases: list[LogitCase] = []
    sha256s: dict[int, str] = {}
    rows: dict[int, tuple[LightRow, ...]] = {}
    for receipt in receipts:
        if receipt.file is None:
            continue
        try:
            with closing(DirectReader(attempt / receipt.file)) as file:
                _check_footer(file, receipt)
                try:
                    # Read through a file that hashes what it reads, so that every byte is read once.
                    with closing(Shard(file, receipt.file)) as shard:
                        _check_shard(unit, shard, receipt, plan, identity, written)
                        cases += _prove(unit, shard, receipt, witnesses, head.vocab_size)
                        rows[receipt.rank] = shard.light
                finally:
                    # Whatever the rows' errors: if the file is not what was written, that is the cause, and
                    # it is written again.
                    sha256s[receipt.rank] = _check_bytes(file, receipt)
        except (DatasetError, OSError, EOFError) as error:
            raise WriteFailed(f"{unit}: a sealed file cannot be read back: {error}") from error
    verdict = check_logits(head, cases)
    if verdict.faults:
        raise StatesWrong("; ".join(verdict.faults))
    checks = UnitChecks(
        rows_checked=sum(len(receipt.rows) for receipt in receipts),
        logit_rows=verdict.rows,
        logit_argmax_agree=verdict.argmax_agree,
        logit_max_error=verdict.max_error,
    )
    return UnitProof(checks, sha256s, rows)


def _account(unit: str, num_rows: int, receipts: Sequence[UnitSealed], skipped: AbstractSet[int]) -> None:
    """Check that every plan row has exactly one outcome, and that the engine dropped none."""
    void = sorted(row for receipt in receipts for row in receipt.void)
    if void:
        rows = ", ".join(map(str, void[:10])) + (f" and {len(void) - 10} more" if len(void) > 10 else "")
        raise EngineDied(f"{unit}: the engine dropped rows {rows}")
    ends = Counter(skipped)
    for receipt in receipts:
        if len(receipt.rows) != len(receipt.num_tokens):
            counts = f"{len(receipt.rows)} rows and {len(receipt.num_tokens)} lengths"
            raise StatesWrong(f"{unit}: the receipt has {counts}")
        ends.update(receipt.rows)
        ends.update(reject.row for reject in receipt.rejected)
    wrong = sorted(row for row in ends.keys() | set(range(num_rows)) if ends[row] != 1 or row >= num_rows)
    if wrong:
        counts = ", ".join(f"row {row} has {ends[row]}" for row in wrong[:5])
        raise StatesWrong(f"{unit}: each of {num_rows} planned rows must have one outcome; {counts}")


def _check_footer(file: DirectReader, receipt: UnitSealed) -> None:
    """Check length and footer against the receipt: pyarrow aborts the process on some damaged footers."""
    if file.num_bytes != receipt.bytes:
        raise DatasetError(f"{receipt.file} has {file.num_bytes} bytes, its receipt says {receipt.bytes}")
    # The length is from the file itself: a wrong one may cost time, but no memory.
    length = int.from_bytes(file.tail(8)[:4].tobytes(), "little")
    xxh3 = file.tail_xxh3(length + 8)
    if xxh3 != receipt.footer_xxh3:
        what = f"the footer of {receipt.file} has xxh3 {xxh3}"
        raise DatasetError(f"{what}, its receipt says {receipt.footer_xxh3}")


def _check_bytes(file: DirectReader, receipt: UnitSealed) -> str:
    """Check every byte against the receipt, including those already read; return the sha256."""
    xxh3, sha256 = file.rest()
    if xxh3 != receipt.xxh3:
        raise DatasetError(f"{receipt.file} has xxh3 {xxh3}, its receipt says {receipt.xxh3}")
    return sha256


def _check_shard(
    unit: str,
    shard: Shard,
    receipt: UnitSealed,
    plan: pa.Table,
    identity: Identity,
    written: Mapping[int, Written],
) -> None:
    """Check that the shard is of this job and holds the planned rows, in the receipt's order."""
    provenance = shard.provenance
    if provenance.identity != identity or provenance.job_id != receipt.attempt_id.job_id:
        raise StatesWrong(f"{unit}: {receipt.file} carries another identity, of job {provenance.job_id}")
    if len(shard.light) != len(receipt.rows):
        counts = f"{len(shard.light)} rows, its receipt {len(receipt.rows)}"
        raise StatesWrong(f"{unit}: {receipt.file} has {counts}")
    planned = plan.take(pa.array(receipt.rows, pa.int64()))
    for place, (row, num_tokens) in enumerate(zip(receipt.rows, receipt.num_tokens, strict=True)):
        light = shard.light[place]
        fault = _plan_fault(light, planned, place, num_tokens, written.get(row))
        if fault is not None:
            raise StatesWrong(f"{unit}, row {row} ({planned['sample_id'][place]}): {fault}")


def _plan_fault(
    light: LightRow, planned: pa.Table, place: int, num_tokens: int, written: Written | None
) -> str | None:
    """Return how a stored row differs from row `place` of `planned`, with both values, or None."""
    names = ("input_ids", "loss_mask")
    plan_ids, plan_mask = (planned[name][place].values.to_numpy() for name in names)
    prompt_tokens = planned["prompt_tokens"][place].as_py()
    ids, mask, lacks = plan_ids, plan_mask, 0
    if written is not None:
        ids, mask, prompt_tokens, lacks = written.ids, written.mask, written.prompt_tokens, 1
    pairs = {
        "sample_id": (light.sample_id, planned["sample_id"][place].as_py()),
        "source_id": (light.source_id, planned["source_id"][place].as_py()),
        "prompt_tokens": (light.prompt_tokens, prompt_tokens),
        "num_tokens": (light.num_tokens, num_tokens),
    }
    for name, (stored, expected) in pairs.items():
        if stored != expected:
            return f"{name} is {stored!r}, expected {expected!r}"
    length, stored = len(plan_ids), light.num_tokens
    if not max(length, len(ids) - lacks) <= stored <= len(ids):
        return f"expected {len(ids)} tokens, got {stored}"
    for name, stored_ids, expected_ids in (
        ("input_ids", light.input_ids[:length], plan_ids),
        ("loss_mask", light.loss_mask[:length], plan_mask),
        ("input_ids", light.input_ids, ids[:stored]),
        ("loss_mask", light.loss_mask, mask[:stored]),
    ):
        differs = np.flatnonzero(stored_ids != expected_ids)
        if differs.size:
            at = int(differs[0])
            return f"{name} differs at {at}: expected {expected_ids[at]}, got {stored_ids[at]}"
    return None


def _prove(
    unit: str, shard: Shard, receipt: UnitSealed, witnesses: Mapping[int, Witness], vocab_size: int
) -> Iterator[LogitCase]:
    """Read every row's bytes again; yield the cases for the logit check.

    The values were checked during capture, and the checksums show that they are unchanged.
    """
    for place, row in enumerate(receipt.rows):
        where = f"{unit}, row {row} ({shard.light[place].sample_id})"
        # The plan was read several times on the way here: the row's sample id proves that it never changed.
        proof = prove_row(shard, place, vocab_size=vocab_size)
        if proof.faults:
            raise StatesWrong(f"{where}: {'; '.join(proof.faults)}")
        if proof.last is None:
            continue
        if row not in witnesses:
            raise StatesWrong(f"{where}: the engine gave no log-probability to check it against")
        yield LogitCase(where, witnesses[row], proof.last)
