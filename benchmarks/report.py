"""Turns the rounds into the report: figures of each row, two tables, and what each row counts. Pure.

GB is 10^9 bytes. Ratios of rates are above 1 where the row is faster than its base.
"""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.catalog import PLAIN, ROWS
from benchmarks.stages import STAGES
from benchmarks.summary import Spread, paired, spread
from benchmarks.table import gigabytes, markdown, ratio
from benchmarks.turns import EngineTurn, WriterTurn

WRITER_ROWS = {
    "write-fsync": "write() + fsync()",
    "quarry": "Quarry's writer, sealed [a]",
    "quarry-unchecked": "the same without the checks [b]",
    "write-fsync-alone": "write() + fsync(), one thread [c]",
    "quarry-alone": "Quarry's writer, one thread [c]",
    "write": "write() alone [d]",
}
WRITER_BASES = {
    "quarry": "write-fsync",
    "quarry-unchecked": "write-fsync",
    "quarry-alone": "write-fsync-alone",
}
"""What a writer row is compared with: the plain way to the same promise."""

CHECKED_ROWS = {
    "unwitnessed": "The drain's checks",
    "unproven": "These, and the engine's likeliest tokens",
    "quarry": "All checks",
}
"""The rows whose checks can be told apart, each with one more than the one before."""

WRITER_NOTES = (
    "Two threads on one core, each with a file of its own, as in an engine: while one waits for the disk, "
    "the other has the core.",
    "[a] From the first row in the pool to the sealed file: checks, xxh3, Parquet, O_DIRECT, fsync, rename, "
    "fsync of the folder. Its base is write() + fsync().",
    "[b] The values are not looked at; the checksums of layers and file are taken. The same base.",
    "[c] One thread with one file: it waits for the disk, and nobody has the core meanwhile. The base of the "
    "second is the first.",
    "[d] The speed of the page cache: nothing is on the disk yet.",
)


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """One engine row over all rounds. Ratios are to plain prefill, round by round, but for `best_ratio`.

    A GB is of the round's states, whatever the row makes of them; rows that store none have the same divisor.
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
class ChecksCost:
    """What a job with all checks takes, as a ratio to the same job without them."""

    seconds_ratio: Spread
    cpu_ratio: Spread


@dataclass(frozen=True, slots=True)
class WriterFigures:
    """One writer row over all rounds; `ratio` is to its base's GB/s, round by round."""

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
    for kind, of_kind in turns.items():
        rates = [num_tokens / turn.seconds for turn in of_kind]
        cpu_s = [turn.cpu_s for turn in of_kind]
        figures[kind] = EngineFigures(
            tokens_per_s=spread(rates),
            ratio=paired(rates, plain_rates),
            best_ratio=max(rates) / max(plain_rates),
            cpu_s_per_gb=spread(used * 1e9 / state_bytes for used in cpu_s),
            cpu_ratio=paired(cpu_s, plain_cpu_s),
            bytes=max(turn.bytes for turn in of_kind),
            files=max(turn.files for turn in of_kind),
            peak_rss_bytes=max(turn.peak_rss_bytes for turn in of_kind),
        )
    return figures


def checks_cost(turns: Mapping[str, Sequence[EngineTurn]]) -> dict[str, ChecksCost]:
    """Compare each row that has checks to the row without, round by round."""
    base = turns["unchecked"]
    return {
        row: ChecksCost(
            seconds_ratio=paired([turn.seconds for turn in turns[row]], [turn.seconds for turn in base]),
            cpu_ratio=paired([turn.cpu_s for turn in turns[row]], [turn.cpu_s for turn in base]),
        )
        for row in CHECKED_ROWS
        if row in turns
    }


def checks_lines(costs: Mapping[str, ChecksCost]) -> str:
    """Return a sentence a row on what its checks cost."""
    return "\n".join(
        f"{CHECKED_ROWS[row]}: {ratio(cost.seconds_ratio)} of the time without checks, "
        f"{ratio(cost.cpu_ratio)} of the CPU seconds."
        for row, cost in costs.items()
    )


def against_peers(turns: Mapping[str, Sequence[EngineTurn]]) -> dict[str, Spread]:
    """Return Quarry's tokens/s, to disk, in units of each peer row's, round by round."""
    ours = [1 / turn.seconds for turn in turns["quarry"]]
    return {row: paired(ours, [1 / turn.seconds for turn in turns[row]]) for row in turns if ROWS[row].peer}


def peers_line(ratios: Mapping[str, Spread]) -> str:
    """Return the sentence on Quarry and its peers."""
    said = ", ".join(f"{ratio(figure)} of {row}" for row, figure in ratios.items())
    return f"Quarry's tokens/s, to disk: {said}."


def writer_figures(turns: Mapping[str, Sequence[WriterTurn]]) -> dict[str, WriterFigures]:
    """Sum up the rounds. Raises ValueError for unequal numbers of rounds."""
    rates = {kind: [turn.bytes / 1e9 / turn.seconds for turn in of_kind] for kind, of_kind in turns.items()}
    return {
        kind: WriterFigures(
            gb_per_s=spread(rates[kind]),
            ratio=paired(rates[kind], rates[WRITER_BASES.get(kind, kind)]),
            cpu_s_per_gb=spread(turn.cpu_s * 1e9 / turn.bytes for turn in of_kind),
        )
        for kind, of_kind in turns.items()
    }


def header(facts: Mapping[str, str | int | float], command: str) -> str:
    """Return the report's head: the command and the machine."""
    return "\n".join([f"$ {command}", *(f"  {name}: {value}" for name, value in facts.items())])


def engine_table(figures: Mapping[str, EngineFigures], workload: str, command: str) -> str:
    """Return the engine part of the report."""
    headers = [
        "engine row",
        "tokens/s median",
        "best",
        "/ plain: median (range)",
        "best",
        "CPU-s/GB of states median",
        "least",
        "/ plain: median (range)",
        "GB stored",
        "files",
        "peak RSS GB",
    ]
    rows = [
        [
            f"{ROWS[kind].label} [{number}]",
            f"{of_kind.tokens_per_s.median:.0f}",
            f"{of_kind.tokens_per_s.high:.0f}",
            ratio(of_kind.ratio),
            f"{of_kind.best_ratio:.2f}",
            f"{of_kind.cpu_s_per_gb.median:.1f}",
            f"{of_kind.cpu_s_per_gb.low:.1f}",
            ratio(of_kind.cpu_ratio),
            gigabytes(of_kind.bytes),
            str(of_kind.files),
            gigabytes(of_kind.peak_rss_bytes),
        ]
        for number, (kind, of_kind) in enumerate(figures.items(), start=1)
    ]
    notes = [f"[{number}] {ROWS[kind].note}" for number, kind in enumerate(figures, start=1)]
    return "\n".join(["", f"$ {command}", workload, "", markdown(headers, rows), *_notes(notes)])


def stages_table(turns: Mapping[str, Sequence[EngineTurn]], cores: int) -> str:
    """Return whose the cores' seconds were, in shares of all of them: medians of the rounds."""
    rows = [
        [
            ROWS[kind].label,
            *(
                f"{spread(turn.stages[stage] / turn.seconds / cores for turn in of_kind).median:.0%}"
                for stage in STAGES
            ),
        ]
        for kind, of_kind in turns.items()
    ]
    return "\n".join(["", markdown(["of the cores' seconds", *STAGES], rows), ""])


def writer_table(figures: Mapping[str, WriterFigures], workload: str, command: str) -> str:
    """Return the writer part of the report."""
    headers = ["writer row", "GB/s median", "best", "/ base: median (range)", "CPU-s/GB median", "least"]
    rows = [
        [
            label,
            f"{of_kind.gb_per_s.median:.2f}",
            f"{of_kind.gb_per_s.high:.2f}",
            ratio(of_kind.ratio),
            f"{of_kind.cpu_s_per_gb.median:.2f}",
            f"{of_kind.cpu_s_per_gb.low:.2f}",
        ]
        for kind, label in WRITER_ROWS.items()
        for of_kind in [figures[kind]]
    ]
    return "\n".join(["", f"$ {command}", workload, "", markdown(headers, rows), *_notes(WRITER_NOTES)])


def _notes(notes: Sequence[str]) -> list[str]:
    return ["", *(textwrap.fill(note, 110, subsequent_indent="    ") for note in notes), ""]
