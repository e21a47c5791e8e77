"""From what a drafter said at each place of a row to the length that a server accepts. Pure.

Place t is the last position that the target has computed when the drafter is asked: it is fed token t + 1
beside the state of t, and its draft j is of token t + 2 + j.

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
class Reading:
    """One row at all places where a server might draft.

    `places_R` are t, ascending; `begins_R` marks the first of each answer. `right_KR`: draft j is the token
    that the target says; `known_KR`: the row knows it. `own` is whether the answers are the target's greedy
    ones, `odds` the mean probability that the drafter gives its first drafts.
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
    """Drafts, each of row `row_D`, at `position_D` in its answer, with `accepted_DK` of its tokens."""

    row_D: NDArray[np.int64]
    position_D: NDArray[np.int64]
    accepted_DK: Floats


@dataclass(frozen=True, slots=True)
class Length:
    """Tokens that one step of the target yields, as vLLM counts: 1 + accepted / drafts. 95 % interval."""

    mean: float
    low: float
    high: float
    drafts: int


def accepted(values_KR: Bools | Floats) -> Floats:
    """Return how likely all drafts up to each are accepted."""
    products: Floats = np.cumprod(values_KR, axis=0, dtype=np.float64)
    return products


def step_rates(readings: Sequence[Reading]) -> Floats:
    """Return how often draft j is right, of those whose drafts before it are: [K]."""
    right_KR = np.concatenate([reading.right_KR for reading in readings], axis=1)
    known_KR = np.concatenate([reading.known_KR for reading in readings], axis=1)
    open_KR = accepted(np.vstack([np.ones_like(right_KR[:1]), right_KR[:-1]])) * known_KR
    rates: Floats = (open_KR * right_KR).sum(axis=1) / np.maximum(open_KR.sum(axis=1), 1)
    return rates


def drafts_of(readings: Sequence[Reading], rates_K: Floats) -> Drafts:
    """Return the drafts of rows: as a server plays them in answers of the target, else at every place.

    What lies behind the end of a row counts as `rates_K` say: vLLM counts before it looks for the end.
    """
    parts = []
    for reading in readings:
        starts = np.flatnonzero(reading.begins_R)
        ends = [*starts[1:], len(reading.places_R)]
        begin_R = np.repeat(reading.places_R[starts], ends - starts)
        sure_R = accepted(reading.right_KR & reading.known_KR).sum(axis=0).astype(int)
        chosen = []
        for at, end in zip(starts, ends, strict=True):
            while at < end:
                chosen.append(at)
                at += 1 + (sure_R[at] if reading.own else 0)
        accepted_RK = accepted(np.where(reading.known_KR, reading.right_KR, rates_K[:, None])).T
        row_D = np.full(len(chosen), reading.number)
        parts.append((row_D, (reading.places_R - begin_R)[chosen], accepted_RK[chosen]))
    return Drafts(*(np.concatenate(part) for part in zip(*parts, strict=True)))


def length(drafts: Drafts) -> Length:
    """Return the expected accepted length, its error by bootstrap over rows."""
    _, row_D = np.unique(drafts.row_D, return_inverse=True)
    sums_N: Floats = np.bincount(row_D, weights=drafts.accepted_DK.sum(axis=1)).astype(np.float64)
    mean, low, high = bootstrap(sums_N, np.bincount(row_D), 0.95)
    return Length(1 + mean, 1 + low, 1 + high, len(row_D))


def by_group(drafts: Drafts, names_D: NDArray[Any]) -> dict[str, Length]:
    """Return the length of the drafts of each name, in the names' order."""
    groups = {}
    for name in np.unique(names_D):
        of = names_D == name
        groups[str(name)] = length(Drafts(drafts.row_D[of], drafts.position_D[of], drafts.accepted_DK[of]))
    return groups


def begin_of(values: NDArray[np.int64], begins: Sequence[int]) -> NDArray[np.int64]:
    """Return where the group of each value begins; `begins` are ascending, the first not above any value."""
    return np.array(begins)[np.searchsorted(begins, values, side="right") - 1]


def bootstrap(sums_N: Floats, counts_N: Counts, confidence: float) -> tuple[float, float, float]:
    """Return the mean of rows of sums over counts, and its interval."""
    draw_SN = np.random.default_rng(0).integers(0, len(sums_N), (RESAMPLES, len(sums_N)))
    means_S = sums_N[draw_SN].sum(-1) / counts_N[draw_SN].sum(-1)
    low, high = np.quantile(means_S, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(sums_N.sum() / counts_N.sum()), float(low), float(high)
