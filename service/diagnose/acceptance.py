"""From what a drafter said at each place of a row to the length that a server accepts. Pure.

Place t is the last position that the target has computed when the drafter is asked: it is fed token t + 1
beside the state of t, and its draft j is of token t + 2 + j.

Legend: K drafted tokens, R places of a row, D drafts.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Scores = list[tuple[float, int]]
"""Row by row, what was accepted at all places, and the places."""
RESAMPLES = 4000
POSITIONS = (0, 8, 16, 32, 64, 128, 256, 512, 1024)
"""Where groups of positions in an answer begin."""


@dataclass(frozen=True, slots=True)
class Reading:
    """One row at all places where a server might draft.

    `places_R` are t, ascending; `begins_R` marks the first of each answer. `right_KR`: draft j is the token
    that the target says; `known_KR`: the row knows it. For a target that samples, `chance_KR` is how likely
    it takes the greedy draft, `overlap_KR` one that is drawn (sum of min(p, q)). `own` is whether the answers
    are the target's greedy ones.
    """

    number: int
    places_R: NDArray[np.int64]
    begins_R: Bools
    right_KR: Bools
    known_KR: Bools
    chance_KR: Floats
    overlap_KR: Floats
    own: bool


@dataclass(frozen=True, slots=True)
class Drafts:
    """What was accepted in one row: `positions_D` in the answer, `accepted_DK` the tokens of each draft."""

    number: int
    positions_D: NDArray[np.int64]
    accepted_DK: Floats


@dataclass(frozen=True, slots=True)
class Length:
    """Tokens that one step of the target yields, as vLLM counts: 1 + accepted / drafts. 95 % interval."""

    mean: float
    low: float
    high: float
    drafts: int


def prefixes(values_KR: Bools | Floats) -> Floats:
    """Return how likely all drafts up to each are accepted."""
    products: Floats = np.cumprod(values_KR, axis=0, dtype=np.float64)
    return products


def step_rates(readings: Sequence[Reading]) -> Floats:
    """Return how often draft j is right, of those whose drafts before it are: [K]."""
    right, asked = np.zeros(len(readings[0].right_KR)), np.zeros(len(readings[0].right_KR))
    for reading in readings:
        before_KR = np.vstack([np.ones_like(reading.right_KR[:1]), reading.right_KR[:-1]])
        open_KR = np.cumprod(before_KR, axis=0).astype(bool) & reading.known_KR
        right += (open_KR & reading.right_KR).sum(axis=1)
        asked += open_KR.sum(axis=1)
    rates: Floats = right / np.maximum(asked, 1)
    return rates


def drafts_of(reading: Reading, rates_K: Floats) -> Drafts:
    """Return the drafts of a row: as a server plays it in answers of the target, else at every place.

    What lies behind the end of the row counts as `rates_K` say: vLLM counts before it looks for the end.
    """
    starts = np.flatnonzero(reading.begins_R)
    first_R = starts[np.searchsorted(starts, np.arange(len(reading.places_R)), side="right") - 1]
    positions_R = reading.places_R - reading.places_R[first_R]
    known_KR = np.cumprod(reading.known_KR, axis=0).astype(bool)
    hit_KR = np.where(known_KR, reading.right_KR, rates_K[:, None])
    accepted_RK = prefixes(hit_KR).T
    chosen = list(range(len(reading.places_R)))
    if reading.own:
        sure_R = (prefixes(reading.right_KR & known_KR)).sum(axis=0).astype(int)
        chosen, at, ends = [], 0, [*starts[1:], len(reading.places_R)]
        for start, end in zip(starts, ends, strict=True):
            at = start
            while at < end:
                chosen.append(at)
                at += 1 + sure_R[at]
    return Drafts(reading.number, positions_R[chosen], accepted_RK[chosen])


def length(drafts: Sequence[Drafts]) -> Length:
    """Return the expected accepted length, its error by bootstrap over rows."""
    accepted = np.array([row.accepted_DK.sum() for row in drafts])
    counts = np.array([len(row.positions_D) for row in drafts])
    if not counts.sum():
        return Length(1.0, 1.0, 1.0, 0)
    low, high = _interval(
        lambda chosen: 1 + accepted[chosen].sum(-1) / np.maximum(counts[chosen].sum(-1), 1), len(drafts)
    )
    return Length(1 + float(accepted.sum() / counts.sum()), low, high, int(counts.sum()))


def by_step(drafts: Sequence[Drafts]) -> list[float]:
    """Return the share of drafts whose token at each step was accepted."""
    accepted_DK = np.concatenate([row.accepted_DK for row in drafts])
    return [float(share) for share in accepted_DK.mean(axis=0)]


def by_position(drafts: Sequence[Drafts]) -> dict[str, Length]:
    """Return the length by the position in the answer at which the draft begins."""
    ends = [*POSITIONS[1:], np.iinfo(np.int64).max]
    groups = {}
    for begin, end in zip(POSITIONS, ends, strict=True):
        parts = []
        for row in drafts:
            inside_D = (row.positions_D >= begin) & (row.positions_D < end)
            if inside_D.any():
                parts.append(Drafts(row.number, row.positions_D[inside_D], row.accepted_DK[inside_D]))
        if parts:
            groups[str(begin)] = length(parts)
    return groups


def by_group(drafts: Iterable[Drafts], name: Callable[[int], str]) -> dict[str, Length]:
    """Return the length by what `name` calls a row's number."""
    groups: dict[str, list[Drafts]] = {}
    for row in drafts:
        groups.setdefault(name(row.number), []).append(row)
    return {key: length(rows) for key, rows in sorted(groups.items())}


def sampled_length(readings: Sequence[Reading], values: str) -> float:
    """Return the expected length at temperature 1, by `chance_KR` or `overlap_KR`, at every place."""
    parts = [prefixes(np.where(one.known_KR, getattr(one, values), 0)).sum(axis=0) for one in readings]
    return 1 + float(np.concatenate(parts).mean())


def score(values_KR: Bools | Floats, known_KR: Bools) -> tuple[float, int]:
    """Return the accepted tokens over all places of a row, and the places: what changes are compared by."""
    return float(prefixes(np.where(known_KR, values_KR, 0)).sum()), values_KR.shape[1]


def mean(scores: Scores) -> float:
    """Return the accepted tokens a place."""
    return sum(value for value, _ in scores) / max(sum(count for _, count in scores), 1)


def difference(ours: Scores, base: Scores, confidence: float) -> tuple[float, float, float]:
    """Return by how much one mean is above the other of the same rows, and its interval."""
    sums, counts = np.array(ours)[:, 0] - np.array(base)[:, 0], np.array(base)[:, 1]
    low, high = _interval(
        lambda chosen: sums[chosen].sum(-1) / np.maximum(counts[chosen].sum(-1), 1), len(counts), confidence
    )
    return float(sums.sum() / max(counts.sum(), 1)), low, high


def _interval(
    statistic: Callable[[NDArray[np.int64]], Floats], num_rows: int, confidence: float = 0.95
) -> tuple[float, float]:
    draw = np.random.default_rng(0)
    values = statistic(draw.integers(0, num_rows, (RESAMPLES, num_rows)))
    low, high = np.quantile(values, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)
