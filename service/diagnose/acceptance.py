"""Computes accepted lengths in serving from a drafter's predictions at each place of a row. Pure functions.

Place t is the last position that the target has computed when the drafter runs: the drafter is fed token t +
1 with the state of t, and its draft j predicts token t + 2 + j.

Legend: K drafted tokens, R places of a row, D drafts, N rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Counts = NDArray[np.integer[Any]]
Bools = NDArray[np.bool_]
RESAMPLES = 4000


@dataclass(frozen=True, slots=True)
class RowPredictions:
    """The drafter's predictions in one row, at all places where a server might draft.

    `places_R` are the places t, ascending; `begins_R` marks the first of each answer. `right_KR` is whether
    draft j is the target's token; `known_KR` whether the row has that token. `own` is whether the answers are
    the target's greedy ones; `odds` is the mean probability that the drafter gives its first drafts.
    """

    number: int
    own: bool
    odds: float
    places_R: NDArray[np.int64]
    begins_R: Bools
    right_KR: Bools
    known_KR: Bools


@dataclass(frozen=True, slots=True)
class Drafts:
    """Drafts: draft d is in row `row_D`, at `position_D` in its answer.

    `accepted_DK` is the probability that each of its tokens is accepted.
    """

    row_D: NDArray[np.int64]
    position_D: NDArray[np.int64]
    accepted_DK: Floats


@dataclass(frozen=True, slots=True)
class Length:
    """Tokens per step of the target, as vLLM counts: 1 + accepted / drafts; with a 95 % interval."""

    mean: float
    low: float
    high: float
    drafts: int


def accepted(values_KR: Bools | Floats) -> Floats:
    """Return, for each draft, the probability that it and all before it are accepted."""
    products: Floats = np.cumprod(values_KR, axis=0, dtype=np.float64)
    return products


def step_rates(predictions: Sequence[RowPredictions]) -> Floats:
    """Return how often draft j is right, given that all drafts before it are: [K]."""
    right_KR = np.concatenate([predicted.right_KR for predicted in predictions], axis=1)
    known_KR = np.concatenate([predicted.known_KR for predicted in predictions], axis=1)
    open_KR = accepted(np.vstack([np.ones_like(right_KR[:1]), right_KR[:-1]])) * known_KR
    rates: Floats = (open_KR * right_KR).sum(axis=1) / np.maximum(open_KR.sum(axis=1), 1)
    return rates


def drafts_of(predictions: Sequence[RowPredictions], rates_K: Floats) -> Drafts:
    """Return the rows' drafts: those a server would make in the target's own answers, else one per place.

    Drafts beyond the end of a row count with the rates `rates_K`: vLLM counts accepted tokens before it
    checks for the end.
    """
    parts = []
    for predicted in predictions:
        starts = np.flatnonzero(predicted.begins_R)
        ends = [*starts[1:], len(predicted.places_R)]
        begin_R = np.repeat(predicted.places_R[starts], ends - starts)
        sure_R = accepted(predicted.right_KR & predicted.known_KR).sum(axis=0).astype(int)
        chosen = []
        for at, end in zip(starts, ends, strict=True):
            while at < end:
                chosen.append(at)
                at += 1 + (sure_R[at] if predicted.own else 0)
        accepted_RK = accepted(np.where(predicted.known_KR, predicted.right_KR, rates_K[:, None])).T
        row_D = np.full(len(chosen), predicted.number)
        parts.append((row_D, (predicted.places_R - begin_R)[chosen], accepted_RK[chosen]))
    return Drafts(*(np.concatenate(part) for part in zip(*parts, strict=True)))


def length(drafts: Drafts) -> Length:
    """Return the expected accepted length, with an interval by bootstrap over rows."""
    _, row_D = np.unique(drafts.row_D, return_inverse=True)
    sums_N: Floats = np.bincount(row_D, weights=drafts.accepted_DK.sum(axis=1)).astype(np.float64)
    mean, low, high = bootstrap(sums_N, np.bincount(row_D), 0.95)
    return Length(1 + mean, 1 + low, 1 + high, len(row_D))


def by_group(drafts: Drafts, names_D: NDArray[Any]) -> dict[str, Length]:
    """Return the accepted length of the drafts of each name, ordered by name."""
    groups = {}
    for name in np.unique(names_D):
        of = names_D == name
        groups[str(name)] = length(Drafts(drafts.row_D[of], drafts.position_D[of], drafts.accepted_DK[of]))
    return groups


def begin_of(values: NDArray[np.int64], begins: Sequence[int]) -> NDArray[np.int64]:
    """Return the begin of each value's group; `begins` is ascending, and its first is not above any value."""
    return np.array(begins)[np.searchsorted(begins, values, side="right") - 1]


def bootstrap(sums_N: Floats, counts_N: Counts, confidence: float) -> tuple[float, float, float]:
    """Return the ratio of the sums to the counts over rows, and its bootstrap interval."""
    draw_SN = np.random.default_rng(0).integers(0, len(sums_N), (RESAMPLES, len(sums_N)))
    means_S = sums_N[draw_SN].sum(-1) / counts_N[draw_SN].sum(-1)
    low, high = np.quantile(means_S, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(sums_N.sum() / counts_N.sum()), float(low), float(high)
