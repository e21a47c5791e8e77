"""Turns the rounds into the report: figures of each row, two tables, and what each row counts. Pure.

GB is 10^9 bytes. Ratios of rates are above 1 where the row is faster than its base.
"""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.summary import Spread, paired, spread
from benchmarks.table import gigabytes, markdown, ratio
from benchmarks.turns import EngineTurn, WriterTurn

PLAIN = "plain"
ENGINE_ROWS = {
    PLAIN: "plain prefill",
    "quarry": "Quarry: checked, sealed, durable, proven [1]",
    "unchecked": "the same without the checks [2]",
    "example": "vLLM's example connector, on the CPU [3]",
}
WRITER_ROWS = {
    "write-fsync": "write() + fsync()",
    "quarry-sealed": "Quarry's writer, sealed [4]",
    "write": "write() alone",
    "quarry-rows": "Quarry's writer, rows alone [5]",
}
WRITER_BASES = {"quarry-sealed": "write-fsync", "quarry-rows": "write"}
"""What a writer row is compared with: the plain way to the same promise."""

ENGINE_NOTES = (
    "[1] Counted until the last unit could be committed: rows checked and hashed, Parquet, fsync, sha256, "
    "rename, fsync of the folder, plan and logits proven from the sealed file, at default settings.",
    "[2] No row checks, no proof of plan and logits; all else is row [1]. What it costs less is what the "
    "checks cost.",
    "[3] Counted until each request's safetensors file opens with all its tokens. That is not durable: "
    "nobody calls fsync in this row, and nothing is checked. Pinned memory, CUDA streams and events are "
    "replaced by what a CPU has.",
)
WRITER_NOTES = (
    "[4] One thread, from the first row in the pool to the sealed file: checks, xxh3, Parquet, fsync, "
    "sha256, rename, fsync of the folder. Its base is write() + fsync().",
    "[5] The same without the seal: checks, xxh3, Parquet into the page cache. Its base is write().",
)


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """One engine row over all rounds. Ratios are to plain prefill, round by round, but for `best_ratio`."""

    tokens_per_s: Spread
    ratio: Spread
    best_ratio: float
    cpu_s_per_mtoken: Spread
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


def engine_figures(turns: Mapping[str, Sequence[EngineTurn]], num_tokens: int) -> dict[str, EngineFigures]:
    """Sum up the rounds of `num_tokens` tokens. Raises ValueError for unequal numbers of rounds."""
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
            cpu_s_per_mtoken=spread(used * 1e6 / num_tokens for used in cpu_s),
            cpu_ratio=paired(cpu_s, plain_cpu_s),
            bytes=max(turn.bytes for turn in of_kind),
            files=max(turn.files for turn in of_kind),
            peak_rss_bytes=max(turn.peak_rss_bytes for turn in of_kind),
        )
    return figures


def checks_cost(turns: Mapping[str, Sequence[EngineTurn]]) -> ChecksCost:
    """Compare the row with all checks to the row without, round by round."""
    checked, unchecked = turns["quarry"], turns["unchecked"]
    return ChecksCost(
        seconds_ratio=paired([turn.seconds for turn in checked], [turn.seconds for turn in unchecked]),
        cpu_ratio=paired([turn.cpu_s for turn in checked], [turn.cpu_s for turn in unchecked]),
    )


def checks_line(cost: ChecksCost) -> str:
    """Return the sentence on what the checks cost."""
    seconds, cpu = ratio(cost.seconds_ratio), ratio(cost.cpu_ratio)
    return f"The checks: {seconds} of the time without them, {cpu} of the CPU seconds."


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
        "CPU-s/Mtoken median",
        "least",
        "/ plain: median (range)",
        "GB written",
        "files",
        "peak RSS GB",
    ]
    rows = [
        [
            label,
            f"{of_kind.tokens_per_s.median:.0f}",
            f"{of_kind.tokens_per_s.high:.0f}",
            ratio(of_kind.ratio),
            f"{of_kind.best_ratio:.2f}",
            f"{of_kind.cpu_s_per_mtoken.median:.0f}",
            f"{of_kind.cpu_s_per_mtoken.low:.0f}",
            ratio(of_kind.cpu_ratio),
            gigabytes(of_kind.bytes),
            str(of_kind.files),
            gigabytes(of_kind.peak_rss_bytes),
        ]
        for kind, label in ENGINE_ROWS.items()
        for of_kind in [figures[kind]]
    ]
    return "\n".join(["", f"$ {command}", workload, "", markdown(headers, rows), *_notes(ENGINE_NOTES)])


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
