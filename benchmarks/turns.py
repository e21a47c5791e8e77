"""What one row gave in one round: plain values, kept in the result file."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class EngineTurn:
    """An engine row's round. Peak memory is of the whole process tree, weights and caches included.

    `stages` are CPU seconds by who used them (`benchmarks.stages`).
    """

    seconds: float
    cpu_s: float
    peak_rss_bytes: int
    files: int
    bytes: int
    stages: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WriterTurn:
    """A writer row's file: seconds, CPU seconds, and the bytes of the states alone, equal for every row."""

    seconds: float
    cpu_s: float
    bytes: int
