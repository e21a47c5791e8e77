"""Holds the last state of every row against the tokens that the engine itself held most likely to come next.

Imports torch: import it lazily. The sampled rows' logits are recomputed whole (`service.proof.logit_check`).
This check looks at a handful of tokens a row, which costs a handful of rows of the head, so no row goes
without: the engine's log-probabilities must differ as the stored state's logits do, within what rounding
explains. Rows that were swapped, shifted or cut fail here, and so does a wrong last layer.

Legend: N rows, K tokens, H hidden size.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from service.proof.head import Gaps, Head
from service.proof.logit_check import MOST_SIGMAS, LogitCase, stacked

_BATCH_ROWS = 64

Said = tuple[tuple[int, float], ...]
"""Tokens and their log-probabilities, the most likely first."""


@dataclass(frozen=True, slots=True)
class GapVerdict:
    """The outcome over many rows. `max_sigmas` is the farthest that any gap was off; `MOST_SIGMAS` may be."""

    faults: tuple[str, ...]
    max_sigmas: float


def check_gaps(head: Head, cases: Sequence[LogitCase]) -> GapVerdict:
    """Say what is wrong, a line for each row that fails, as one without two tokens to compare does."""
    faults: list[str] = []
    max_sigmas = 0.0
    for start in range(0, len(cases), _BATCH_ROWS):
        batch = cases[start : start + _BATCH_ROWS]
        said = [_said(case, head.vocab_size) for case in batch]
        # A row of fewer tokens repeats its first; the repetitions are not compared.
        width = max(len(row) for row in said)
        tokens_NK = torch.tensor([[token for token, _ in (row + row[:1] * width)[:width]] for row in said])
        states_NH, half_NH = stacked(batch)
        gaps = head.gaps(states_NH, tokens_NK, half_NH)
        for place, (case, row) in enumerate(zip(batch, said, strict=True)):
            fault, sigmas = _compare(gaps, place, row)
            max_sigmas = max(max_sigmas, sigmas)
            if fault is not None:
                faults.append(f"{case.where}: {fault}")
    return GapVerdict(tuple(faults), max_sigmas)


def _said(case: LogitCase, vocab_size: int) -> Said:
    """Return what the witness says; never empty, so that a fault can be told of it."""
    witness = case.witness
    every = ((witness.next_token, witness.next_logprob), *witness.others)
    kept = tuple((token, lp) for token, lp in every if math.isfinite(lp) and 0 <= token < vocab_size)
    return kept or ((0, 0.0),)


def _compare(gaps: Gaps, place: int, said: Said) -> tuple[str | None, float]:
    """Return a fault or none, and by how many sigmas the farthest gap is off."""
    if len(said) < 2:
        return "the engine gave no two log-probabilities to prove it by", 0.0
    (first, most), *others = said
    farthest = 0.0
    for column, (token, logprob) in enumerate(others, start=1):
        gap, sigma = float(gaps.gap[place, column]), float(gaps.sigma[place, column])
        told = most - logprob
        off = abs(gap - told) / sigma
        farthest = max(farthest, off)
        # Written so that NaN is no agreement.
        if not off <= MOST_SIGMAS:
            says = f"token {first} is {gap:.4f} above token {token} by the stored states"
            explained = f"rounding explains {MOST_SIGMAS * sigma:.4f}"
            return f"{says}, {told:.4f} by the engine; {explained}", farthest
    return None, farthest
