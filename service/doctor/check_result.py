"""The result of a check of one thing that a node needs."""

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """Whether it will work, may work badly, will not work, or could not be checked."""

    GOOD = "good"
    DOUBTFUL = "doubtful"
    BAD = "bad"
    UNSEEN = "not seen"


@dataclass(frozen=True, slots=True)
class CheckResult:
    """What was checked, with figures; `cure` says what to do if it is not good."""

    what: str
    verdict: Verdict
    detail: str
    cure: str | None = None


def at_least(value: float, wanted: float, needed: float = 0.0) -> Verdict:
    """Return the verdict on a value: good from `wanted` up, bad below `needed`, else doubtful."""
    return Verdict.BAD if value < needed else Verdict.DOUBTFUL if value < wanted else Verdict.GOOD
