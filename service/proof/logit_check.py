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

from schemas.dataset.index import Witness
from service.proof.head import Head, Opinion

_BATCH_ROWS = 64
_DOUBT = 32.0
"""A right row or set of rows is taken for wrong with a chance of exp(-32), 1e-14."""


@dataclass(frozen=True, slots=True)
class LogitCase:
    """One row under the check.

    `state_H` is its last token's pre-norm state, `where` names it in messages. `half_H` says how far each
    captured value may lie from the stored one, null where they are the same.
    """

    where: str
    state_H: torch.Tensor
    witness: Witness
    half_H: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class LogitReading:
    """One row: the log-probability that the engine told, and the one found by its states.

    `sigma` is the deviation of their difference that rounding explains; a row may be off by `MOST_SIGMAS`.
    """

    where: str
    told: float
    found: float
    sigma: float
    agrees: bool
    fault: bool


@dataclass(frozen=True, slots=True)
class LogitVerdict:
    """The outcome over many rows. `argmax_agree` counts equal tokens; a swap by rounding is no fault."""

    rows: int
    argmax_agree: int
    max_error: float
    faults: tuple[str, ...]
    readings: tuple[LogitReading, ...] = ()


def logit_rows(sample_ids: Sequence[str], share: float, minimum: int) -> frozenset[int]:
    """Choose `share` of the rows, at least `minimum`: those whose sample ids have the smallest hashes."""
    count = min(len(sample_ids), max(minimum, math.ceil(share * len(sample_ids))))
    ranked = sorted(
        range(len(sample_ids)), key=lambda row: (xxhash.xxh3_64_intdigest(sample_ids[row].encode()), row)
    )
    return frozenset(ranked[:count])


def stacked(cases: Sequence[LogitCase]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the states [N, H] of cases of one dataset, and how far the captured ones may lie from them."""
    halves = [case.half_H for case in cases if case.half_H is not None]
    return torch.stack([case.state_H for case in cases]), torch.stack(halves) if halves else None


def check_logits(head: Head, cases: Sequence[LogitCase]) -> LogitVerdict:
    """Recompute the next token's log-probability of each case and compare it with its witness.

    A row fails if the engine's token is not the states' own, or its log-probability another, beyond what
    rounding explains. The rows together fail if their errors are too large as a whole, which shows what is
    only slightly wrong in each of them. Both bounds are those of a sum of n squared unit Gaussians (Laurent
    and Massart): at most n + 2 sqrt(n x) + 2 x but for a chance of exp(-x).
    """
    faults: list[str] = []
    sigmas: list[tuple[float, str]] = []
    readings: list[LogitReading] = []
    agree, max_error = 0, 0.0
    for start in range(0, len(cases), _BATCH_ROWS):
        batch = cases[start : start + _BATCH_ROWS]
        # A token outside the vocabulary is a fault of its own; here it only must not be an index.
        named_N = torch.tensor([case.witness.next_token for case in batch]).clamp(0, head.vocab_size - 1)
        states_NH, half_NH = stacked(batch)
        opinion = head.opinion(states_NH, named_N, half_NH)
        for row, case in enumerate(batch):
            fault, error = _compare(opinion, row, case.witness, head.vocab_size)
            max_error = max(max_error, error)
            agrees = int(opinion.own_token[row]) == case.witness.next_token
            agree += agrees
            found = (float(opinion.logprob[row]), float(opinion.sigma[row]), agrees, fault is not None)
            readings.append(LogitReading(case.where, case.witness.next_logprob, *found))
            if fault is None:
                sigmas.append((error / float(opinion.sigma[row]), case.where))
            else:
                faults.append(f"{case.where}: {fault}")
    total, limit = sum(sigma**2 for sigma, _ in sigmas), _most(len(sigmas))
    if total > limit:
        worst, where = max(sigmas)
        about = f"the log-probabilities of {len(sigmas)} rows are off by {total:.0f} squared sigmas together"
        faults.append(
            f"{where}: {about}, rounding explains {limit:.0f}; this row is off by {worst:.1f} sigmas"
        )
    return LogitVerdict(len(cases), agree, max_error, tuple(faults), tuple(readings))


def _most(count: int) -> float:
    """Return the most that `count` squared unit Gaussians add up to."""
    return count + 2 * math.sqrt(count * _DOUBT) + 2 * _DOUBT


MOST_SIGMAS = math.sqrt(_most(1))
"""How far off a single row may be."""


def _compare(opinion: Opinion, row: int, witness: Witness, vocab_size: int) -> tuple[str | None, float]:
    """Return a fault or none, and the |log-probability difference|."""
    if not 0 <= witness.next_token < vocab_size:
        return f"the engine's next token {witness.next_token} is outside the vocabulary", math.inf
    logprob, sigma = float(opinion.logprob[row]), float(opinion.sigma[row])
    error = abs(logprob - witness.next_logprob)
    if not math.isfinite(error):
        return "its log-probabilities are not finite", math.inf
    own_token = int(opinion.own_token[row])
    if float(opinion.gap[row]) > MOST_SIGMAS * float(opinion.gap_sigma[row]):
        return f"the stored states say token {own_token}, the engine said {witness.next_token}", error
    if not error <= MOST_SIGMAS * sigma:
        says = f"token {witness.next_token} has log-probability {logprob:.4f} by the stored states"
        explained = f"rounding explains {MOST_SIGMAS * sigma:.4f}"
        return f"{says}, {witness.next_logprob:.4f} by the engine; {explained}", error
    return None, error
