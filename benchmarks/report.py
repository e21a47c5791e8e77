"""Turns the rounds of the engine, writer and reader rows into figures and tables. Pure.

GB are 10^9 bytes. Ratios of rates are above 1 where the row is faster than its base.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.catalog import PLAIN, ROWS
from benchmarks.harness import Spread, markdown, paired, spread

WRITER_ROWS = {
    "write-fsync": "write() + fsync()",
    "quarry": "Quarry's writer, sealed",
    "write-fsync-alone": "write() + fsync(), one thread",
    "quarry-alone": "Quarry's writer, one thread",
    "write": "write() alone",
}
WRITER_BASES = {
    "quarry": "write-fsync",
    "quarry-alone": "write-fsync-alone",
}
"""What a writer row is compared with: the plain way to the same promise."""


@dataclass(frozen=True, slots=True)
class EngineTurn:
    """An engine row's round. Peak memory is of the whole process tree, weights and caches included.

    `answered_s` is when the engine gave its last answer; what is left of `seconds` then is the storing of the
    last unit or file, which a job has once and not once a round.
    """

    seconds: float
    answered_s: float
    cpu_s: float
    peak_rss_bytes: int
    files: int
    bytes: int


@dataclass(frozen=True, slots=True)
class RateTurn:
    """A round of a writer or a reader: wall and CPU seconds, and the bytes of the states alone."""

    seconds: float
    cpu_s: float
    bytes: int


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """One engine row over all rounds. Ratios are to plain prefill, round by round, but for `best_ratio`.

    A GB is of the round's states, whatever the row stores of them.
    """

    tokens_per_s: Spread
    ratio: Spread
    best_ratio: float
    cpu_s_per_gb: Spread
    cpu_ratio: Spread
    bytes: int
    files: int
    peak_rss_bytes: int


@dataclass(frozen=True, slots=True)
class RateFigures:
    """One row over all rounds; `ratio` is to its base's GB/s, round by round."""

    gb_per_s: Spread
    ratio: Spread
    cpu_s_per_gb: Spread


def engine_figures(
    turns: Mapping[str, Sequence[EngineTurn]], num_tokens: int, state_bytes: int
) -> dict[str, EngineFigures]:
    """Sum up the rounds of `num_tokens` tokens, whose states are `state_bytes`.

    Raises ValueError for unequal numbers of rounds.
    """
    plain_rates = [num_tokens / turn.seconds for turn in turns[PLAIN]]
    plain_cpu_s = [turn.cpu_s for turn in turns[PLAIN]]
    figures = {}
    for row, of_row in turns.items():
        rates = [num_tokens / turn.seconds for turn in of_row]
        cpu_s = [turn.cpu_s for turn in of_row]
        figures[row] = EngineFigures(
            tokens_per_s=spread(rates),
            ratio=paired(rates, plain_rates),
            best_ratio=max(rates) / max(plain_rates),
            cpu_s_per_gb=spread(used * 1e9 / state_bytes for used in cpu_s),
            cpu_ratio=paired(cpu_s, plain_cpu_s),
            bytes=max(turn.bytes for turn in of_row),
            files=max(turn.files for turn in of_row),
            peak_rss_bytes=max(turn.peak_rss_bytes for turn in of_row),
        )
    return figures


def against_peers(turns: Mapping[str, Sequence[EngineTurn]]) -> dict[str, Spread]:
    """Return Quarry's tokens/s in units of each peer row's, round by round; nothing without Quarry."""
    ours = [1 / turn.seconds for turn in turns.get("quarry", ())]
    peers = [row for row in turns if ROWS[row].peer] if ours else []
    return {row: paired(ours, [1 / turn.seconds for turn in turns[row]]) for row in peers}


def rate_figures(turns: Mapping[str, Sequence[RateTurn]], bases: Mapping[str, str]) -> dict[str, RateFigures]:
    """Sum up the rounds; `bases` names the row that each is compared with.

    Raises ValueError for unequal numbers of rounds.
    """
    rates = {row: [turn.bytes / 1e9 / turn.seconds for turn in of_row] for row, of_row in turns.items()}
    return {
        row: RateFigures(
            gb_per_s=spread(rates[row]),
            ratio=paired(rates[row], rates[bases[row]]),
            cpu_s_per_gb=spread(turn.cpu_s * 1e9 / turn.bytes for turn in of_row),
        )
        for row, of_row in turns.items()
    }


def engine_table(figures: Mapping[str, EngineFigures], peers: Mapping[str, Spread]) -> str:
    """Return the table of the engine rows, with Quarry's rate in units of each of `peers`."""
    headers = ["engine row", "tokens/s", "/ plain", "best / best", "Quarry / this", "CPU-s/GB", "/ plain"]
    rows = [
        [
            ROWS[row].label,
            f"{of_row.tokens_per_s.median:.0f}",
            str(of_row.ratio),
            f"{of_row.best_ratio:.2f}",
            str(peers.get(row, "")),
            f"{of_row.cpu_s_per_gb.median:.1f}",
            str(of_row.cpu_ratio),
            f"{of_row.bytes / 1e9:.2f}",
            str(of_row.files),
            f"{of_row.peak_rss_bytes / 1e9:.2f}",
        ]
        for row, of_row in figures.items()
    ]
    return markdown([*headers, "GB stored", "files", "peak RSS GB"], rows)


def rate_table(
    title: str, figures: Mapping[str, RateFigures], labels: Mapping[str, str], base: str = "base"
) -> str:
    """Return the table of the rows by their labels."""
    rows = [
        [labels[row], str(of_row.gb_per_s), str(of_row.ratio), str(of_row.cpu_s_per_gb)]
        for row, of_row in figures.items()
    ]
    return markdown([title, "GB/s", f"/ {base}", "CPU-s/GB"], rows)
