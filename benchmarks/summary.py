"""Rounds, and what is said of them: medians, best rounds, and ratios within a round. Pure."""

import random
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure over all rounds."""

    median: float
    low: float
    high: float


def spread(values: Iterable[float]) -> Spread:
    """Return the median and the two ends of `values`. Raises ValueError if there are none."""
    ordered = sorted(values)
    if not ordered:
        raise ValueError("no rounds to sum up")
    return Spread(statistics.median(ordered), ordered[0], ordered[-1])


def paired(values: Sequence[float], base: Sequence[float]) -> Spread:
    """Return the spread of value / base, round by round: what slows a whole round cancels out.

    Raises ValueError for unequal numbers of rounds.
    """
    return spread(value / reference for value, reference in zip(values, base, strict=True))


def shuffled_rounds(rows: Sequence[str], num_rounds: int, seed: int) -> list[list[str]]:
    """Return for each round every row once, in an order of its own."""
    draw = random.Random(seed)
    return [draw.sample(rows, len(rows)) for _ in range(num_rounds)]
