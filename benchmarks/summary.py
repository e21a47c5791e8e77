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
    """Return for each round every row once: drawn, and every second round the one before it backwards.

    So of two rows each goes first as often as the other, but for an odd last round.
    """
    draw = random.Random(seed)
    orders: list[list[str]] = []
    while len(orders) < num_rounds:
        order = draw.sample(rows, len(rows))
        orders += [order, order[::-1]]
    return orders[:num_rounds]
