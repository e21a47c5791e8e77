"""The logit check of datasets whose index has the engine's most likely next token alone.

Imports torch: import it lazily. Versions up to 0.1 kept one token, for some of the rows. Its log-probability
is recomputed by the whole softmax of the stored state, within the bounds of docs/tolerance.md.

Legend: N rows.
"""

import math
from collections.abc import Iterator, Sequence

import torch

from service.proof.head import Head
from service.proof.logit_check import (
    MOST_SIGMAS,
    LogitCase,
    LogitReading,
    LogitVerdict,
    batches,
    judge,
    stacked,
)


def check_next_tokens(head: Head, cases: Sequence[LogitCase]) -> LogitVerdict:
    """Hold each case's most likely next token and its log-probability against the stored state.

    A reading's `engine` and `stored` are the token's log-probability.
    """
    return judge([reading for batch in batches(cases) for reading in _check_batch(head, batch)])


def _check_batch(head: Head, cases: Sequence[LogitCase]) -> Iterator[LogitReading]:
    # A token outside the vocabulary is a fault of its own; here it only must not be an index.
    tokens_N = torch.tensor([case.witness[0][0] for case in cases]).clamp(0, head.vocab_size - 1)
    states_NH, half_NH = stacked(cases)
    opinion = head.opinion(states_NH, tokens_N, half_NH)
    gaps = head.gaps(states_NH, torch.stack([opinion.own_token, tokens_N], dim=1), half_NH)
    for row, case in enumerate(cases):
        token, engine = case.witness[0]
        own_token = int(opinion.own_token[row])
        stored, sigma = float(opinion.logprob[row]), float(opinion.sigma[row])
        off = (stored - engine) / sigma
        fault = None
        if not 0 <= token < head.vocab_size:
            fault = f"the engine's next token {token} is outside the vocabulary"
        elif not math.isfinite(off):
            fault = "its log-probabilities are not finite"
        elif float(gaps.gap[row, 1]) > MOST_SIGMAS * float(gaps.sigma[row, 1]):
            fault = f"the stored states say token {own_token}, the engine said {token}"
        elif abs(off) > MOST_SIGMAS:
            says = f"token {token} has log-probability {stored:.4f} by the stored states"
            fault = f"{says}, {engine:.4f} by the engine; rounding explains {MOST_SIGMAS * sigma:.4f}"
        yield LogitReading(case.where, engine, stored, sigma, own_token == token, fault, off**2)
