"""Checks the last state of every row against the engine's log-probabilities of the next token.

Imports torch: import it lazily. The engine returns its most likely tokens with their log-probabilities. After
norm and head, the differences between the stored state's logits of these tokens must equal those between the
log-probabilities, within the bounds of docs/tolerance.md. A wrong layer N, a missing norm, another request's
row, a stale block at the row's end and corrupt storage all fail here.

Legend: N rows, K tokens, H hidden size.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from schemas.dataset.index import Witness
from schemas.dataset.states import StoredState
from service.proof.head import Head

BATCH_ROWS = 64
_DOUBT = 32.0
"""A correct row or set of rows is rejected with a probability of exp(-32), about 1e-14."""


def _bound(count: int) -> float:
    """Return an upper bound on the sum of `count` squared unit Gaussians."""
    return count + 2 * math.sqrt(count * _DOUBT) + 2 * _DOUBT


MOST_SIGMAS = math.sqrt(_bound(1))
"""How many sigmas a single value may be off."""


@dataclass(frozen=True, slots=True)
class LogitCase:
    """One row to check.

    `last` is its last token's pre-norm state; `where` names the row in messages.
    """

    where: str
    witness: Witness
    last: StoredState


@dataclass(frozen=True, slots=True)
class LogitReading:
    """The result for one row: the gap by the `engine` and by the `stored` state, in nats.

    The gap is of the token that is farthest off: how far its log-probability is below the most likely
    token's. `sigma` is the standard deviation that rounding explains; a row may be off by `MOST_SIGMAS`.
    `agrees` means that the stored state finds no other of the tokens more likely. `fault` says what is wrong;
    `mean_square` is the mean of the squared deviations of all tokens, in sigmas.
    """

    where: str
    engine: float
    stored: float
    sigma: float
    agrees: bool
    fault: str | None
    mean_square: float


@dataclass(frozen=True, slots=True)
class LogitVerdict:
    """The outcome over many rows. `argmax_agree` counts rows whose reading agrees; a swap due to rounding is
    not a fault. `max_error` is the largest |engine - stored|.
    """

    rows: int
    argmax_agree: int
    max_error: float
    faults: tuple[str, ...]
    readings: tuple[LogitReading, ...] = ()


def check_logits(head: Head, cases: Sequence[LogitCase]) -> LogitVerdict:
    """Check every case against its witness, and all cases without a fault against a common bound.

    The common bound detects errors that are small in each row.
    """
    starts = range(0, len(cases), BATCH_ROWS)
    readings = [one for start in starts for one in _check_batch(head, cases[start : start + BATCH_ROWS])]
    faults = [f"{reading.where}: {reading.fault}" for reading in readings if reading.fault is not None]
    passed = [reading for reading in readings if reading.fault is None]
    total, limit = sum(reading.mean_square for reading in passed), _bound(len(passed))
    if total > limit:
        worst = max(passed, key=lambda reading: reading.mean_square)
        faults.append(
            f"{worst.where}: the log-probabilities of {len(passed)} rows are off by {total:.0f} "
            f"squared sigmas together, rounding explains {limit:.0f}; this row is off by "
            f"{math.sqrt(worst.mean_square):.1f} sigmas"
        )
    errors = [abs(reading.engine - reading.stored) for reading in readings]
    return LogitVerdict(
        rows=len(readings),
        argmax_agree=sum(reading.agrees for reading in readings),
        max_error=max((error if math.isfinite(error) else math.inf for error in errors), default=0.0),
        faults=tuple(faults),
        readings=tuple(readings),
    )


def _check_batch(head: Head, cases: Sequence[LogitCase]) -> Iterator[LogitReading]:
    likely = [_likely(case.witness, head.vocab_size) for case in cases]
    width = max(1, *(len(tokens) for tokens in likely))
    # Shorter rows are padded with their first token, whose gap to itself is 0; empty rows are refused below.
    padded = [(tokens + (tokens[:1] or ((0, 0.0),)) * width)[:width] for tokens in likely]
    tokens_NK = torch.tensor([[token for token, _ in tokens] for tokens in padded], dtype=torch.int64)
    logprobs_NK = torch.tensor([[logprob for _, logprob in tokens] for tokens in padded], dtype=torch.float64)
    halves = [case.last.half_H for case in cases if case.last.half_H is not None]
    states_NH = torch.stack([case.last.state_H for case in cases])
    gaps = head.gaps(states_NH, tokens_NK, torch.stack(halves) if halves else None)
    engine_NK = logprobs_NK[:, :1] - logprobs_NK
    sigmas_NK = (gaps.gap - engine_NK) / gaps.sigma
    # NaN is not agreement: it counts as the farthest off.
    farthest_N = sigmas_NK.abs().nan_to_num(math.inf).argmax(dim=1)
    for row, (case, tokens) in enumerate(zip(cases, likely, strict=True)):
        if len(tokens) < 2:
            what = "the engine gave fewer than two log-probabilities"
            yield LogitReading(case.where, math.nan, math.nan, math.nan, False, what, math.inf)
            continue
        at = int(farthest_N[row])
        gap, engine, sigma = (float(values[row, at]) for values in (gaps.gap, engine_NK, gaps.sigma))
        fault = None
        if not abs(gap - engine) <= MOST_SIGMAS * sigma:
            says = f"token {tokens[0][0]} is {gap:.4f} above token {tokens[at][0]} by the stored states"
            fault = f"{says}, {engine:.4f} by the engine; rounding explains {MOST_SIGMAS * sigma:.4f}"
        agrees = bool((gaps.gap[row] >= 0).all())
        mean_square = float(sigmas_NK[row].square().sum()) / (len(tokens) - 1)
        yield LogitReading(case.where, engine, gap, sigma, agrees, fault, mean_square)


def _likely(witness: Witness, vocab_size: int) -> Witness:
    """Return the witness's comparable tokens, most likely first; empty if the most likely one is not."""
    usable = [
        (token, logprob) for token, logprob in witness if math.isfinite(logprob) and 0 <= token < vocab_size
    ]
    return tuple(usable) if witness[0] in usable else ()
