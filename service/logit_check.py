"""Holds states read from a sealed file against what the engine said of the same tokens.

Imports torch: import it lazily. The last token's pre-norm state, through norm and head, must give the
engine's own next token and its log-probability, within what rounding explains. A wrong layer N, a missing
norm, another request's row, a stale block at the row's end and broken storage all fail here.

Legend: N rows, H hidden size.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import xxhash

from service.head import Head, Logprobs

_BATCH_ROWS = 64


@dataclass(frozen=True, slots=True)
class Witness:
    """What the engine itself said after a row's last token: its most likely next token, and how likely.

    At a temperature above 0 the sampled token may be another; the witness is the raw logits' argmax even so.
    """

    next_token: int
    next_logprob: float


@dataclass(frozen=True, slots=True)
class LogitCase:
    """One row under the check: `state_H` is its last token's pre-norm state, `where` names it in messages."""

    where: str
    state_H: torch.Tensor
    witness: Witness


@dataclass(frozen=True, slots=True)
class LogitVerdict:
    """The outcome over many rows. `argmax_agree` counts equal tokens; a swap by rounding is no fault."""

    rows: int
    argmax_agree: int
    max_error: float
    faults: tuple[str, ...]


def logit_rows(sample_ids: Sequence[str], share: float, minimum: int) -> frozenset[int]:
    """Choose `share` of the rows, at least `minimum`: those whose sample ids have the smallest hashes."""
    count = min(len(sample_ids), max(minimum, math.ceil(share * len(sample_ids))))
    ranked = sorted(range(len(sample_ids)), key=lambda row: (xxhash.xxh3_64_intdigest(sample_ids[row].encode()), row))
    return frozenset(ranked[:count])


def check_logits(head: Head, cases: Sequence[LogitCase]) -> LogitVerdict:
    """Recompute the next token's log-probabilities of each case and compare them with its witness."""
    agree, max_error, faults = 0, 0.0, []
    for start in range(0, len(cases), _BATCH_ROWS):
        batch = cases[start : start + _BATCH_ROWS]
        logprobs = head.logprobs_with_bounds(torch.stack([case.state_H for case in batch]))
        for row, case in enumerate(batch):
            fault, error, same = _compare(logprobs, row, case.witness)
            agree += same
            max_error = max(max_error, error)
            if fault is not None:
                faults.append(f"{case.where}: {fault}")
    return LogitVerdict(len(cases), agree, max_error, tuple(faults))


def _compare(logprobs: Logprobs, row: int, witness: Witness) -> tuple[str | None, float, bool]:
    """Return a fault or none, the |log-probability difference|, and whether the two argmaxes are equal."""
    values_V = logprobs.values_NV[row]
    if not 0 <= witness.next_token < len(values_V):
        return f"the engine's next token {witness.next_token} is outside the vocabulary", math.inf, False
    own_token = int(values_V.argmax())
    own_logprob = float(values_V[witness.next_token])
    error = abs(own_logprob - witness.next_logprob)
    if not math.isfinite(error):
        return "its log-probabilities are not finite", math.inf, False
    if own_token != witness.next_token and not logprobs.may_swap(row, own_token, witness.next_token):
        says = f"the stored states say token {own_token}, the engine said {witness.next_token}"
        return says, error, False
    bound = logprobs.bound(row, witness.next_token)
    if not error <= bound:
        says = f"token {witness.next_token} has log-probability {own_logprob:.4f} by the stored states"
        says = f"{says}, {witness.next_logprob:.4f} by the engine; rounding explains {bound:.4f}"
        return says, error, False
    return None, error, own_token == witness.next_token
