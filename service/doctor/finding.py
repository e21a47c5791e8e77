"""What was found of one thing that a node needs."""

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """Whether work goes well, may go badly or will not go, or that nothing can be said."""

    GOOD = "good"
    DOUBTFUL = "doubtful"
    BAD = "bad"
    UNSEEN = "not seen"


@dataclass(frozen=True, slots=True)
class Finding:
    """What was looked at, and with which figures; `cure` says what to do where it is not good."""

    what: str
    verdict: Verdict
    detail: str
    cure: str | None = None


def at_least(value: float, wanted: float, needed: float = 0.0) -> Verdict:
    """Return the verdict on a value: good from `wanted` on, bad below `needed`."""
    return Verdict.BAD if value < needed else Verdict.DOUBTFUL if value < wanted else Verdict.GOOD
