"""What every benchmark shares: its options, interleaved rounds, figures over them, tables and result files.

GB are 10^9 bytes.
"""

import argparse
import json
import os
import random
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

Turn = TypeVar("Turn")
"""What a row gives in a round."""

RESULTS = Path(__file__).with_name("results")

ENVIRONMENT = {
    # vLLM reserves one core more for an engine with a connector; left alone, rows would have unequal cores.
    "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
    # GiB of cache an engine: as many as five live side by side.
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    # A step's tensors are reused by the next step, in huge pages. By default glibc gives them back to the
    # kernel after every step, and an engine without arithmetic does little but fault them in.
    "GLIBC_TUNABLES": ":".join(
        f"glibc.malloc.{name}={value}"
        for name, value in (("mmap_threshold", 2**31), ("trim_threshold", 2**32), ("hugetlb", 1))
    ),
    # vLLM ends its workers by signal; what they leave is cleaned up, and need not be announced.
    "PYTHONWARNINGS": "ignore:resource_tracker",
}
"""The same for every engine; what the caller has set already stays."""


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure over all rounds."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        """Return the median with its ends, such as `0.97 (0.95..1.01)`."""
        return f"{self.median:.2f} ({self.low:.2f}..{self.high:.2f})"


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


def run_rounds(
    rows: Sequence[str], orders: Iterable[Sequence[str]], run: Callable[[str, int], Turn]
) -> dict[str, list[Turn]]:
    """Run every row once as round 0, which does not count, and then in each round; return them by row."""
    for row in rows:
        say(f"warm-up {row}")
        run(row, 0)
    turns: dict[str, list[Turn]] = {row: [] for row in rows}
    for number, order in enumerate(orders, start=1):
        for row in order:
            say(f"round {number} {row}")
            turns[row].append(run(row, number))
    return turns


def markdown(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of one column of text and others of figures. Raises ValueError for a short row."""
    columns = list(zip(headers, *rows, strict=True))
    widths = [max(3, *map(len, column)) for column in columns]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    lines = [headers, rule, *rows]
    return "\n".join(
        "| "
        + " | ".join(
            cell.rjust(width) if place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        + " |"
        for line in lines
    )


def command_line(
    module: str, description: str | None, *, save: str | None = None, rounds: int | None = None
) -> argparse.ArgumentParser:
    """Return the parser of `python -m MODULE` with what all share.

    `--save` keeps the figures as `results/SAVE.json`; `--rounds` and `--seed` are there if there are rounds.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=description)
    if save is not None:
        parser.add_argument("--save", action="store_const", const=save, help=f"keep results/{save}.json")
    if rounds is not None:
        parser.add_argument("--rounds", type=positive, default=rounds, help=f"default: {rounds}")
        parser.add_argument("--seed", type=int, default=0, help="of the order within a round")
    return parser


def positive(text: str) -> int:
    """Return a number above 0, for argparse."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is below 1")
    return number


def command(module: str, options: argparse.Namespace) -> str:
    """Return the command that measures the same again: every option but `--save`, and no path."""
    words = [".venv/bin/python -m", module]
    for name, value in vars(options).items():
        if name == "save" or isinstance(value, Path) or value is None or value is False:
            continue
        words.append(f"--{name.replace('_', '-')}")
        if value is not True:
            words += map(str, value if isinstance(value, list | tuple) else [value])
    return " ".join(words)


def set_environment() -> None:
    """Put ENVIRONMENT into this process's, for itself and its children."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def kept_rounds(
    orders: Sequence[Sequence[str]], turns: Mapping[str, Sequence[Any]], summary: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what a result file holds of rounds: the orders, every row's turns, and the figures over them.

    Turns and figures are dataclasses.
    """
    return {
        "orders": orders,
        "rounds": {row: [asdict(turn) for turn in of_row] for row, of_row in turns.items()},
        "summary": {row: asdict(figures) for row, figures in summary.items()},
    }


def keep(name: str | None, result: Mapping[str, Any]) -> None:
    """Write `results/NAME.json`; nothing if there is no name."""
    if name is not None:
        RESULTS.joinpath(f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")


def say(progress: str) -> None:
    """Print a line of progress, apart from the report."""
    print(progress, file=sys.stderr, flush=True)
