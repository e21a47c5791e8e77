"""The benchmark's arguments: what is asked for, and the command that asks for it again."""

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.workload import TARGETS

ROUNDS, QUICK_ROUNDS = 5, 2
WRITER_ROWS, QUICK_WRITER_ROWS = 64, 16
NUM_UNITS = 4
PARTS = ("engines", "writer")
NAME_PATTERN = r"[a-z0-9][a-z0-9._-]{0,63}"


@dataclass(frozen=True, slots=True)
class Options:
    """Everything that decides a run, but for the folder it writes in and the name of its results."""

    target: str
    rounds: int
    prompts: int
    writer_rows: int
    parts: tuple[str, ...]
    seed: int
    folder: Path
    save: str | None

    def command(self, *parts: str) -> str:
        """Return the command that measures the same again, or only `parts` of it."""
        said = [
            f"--target {self.target}",
            f"--rounds {self.rounds}",
            f"--prompts {self.prompts}",
            f"--writer-rows {self.writer_rows}",
            f"--seed {self.seed}",
            *(f"--only {part}" for part in (parts or self.parts) if len(parts or self.parts) < len(PARTS)),
        ]
        return f".venv/bin/python -m benchmarks.bench {' '.join(said)}"


def parse(arguments: Sequence[str] | None = None) -> Options:
    """Read the command line; a bad one ends the process with status 2 and a line that names the argument."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.bench", description="Measure Quarry; see benchmarks/README.md."
    )
    add = parser.add_argument
    add("--target", choices=TARGETS, default="compute", help="which bound to measure at (default: compute)")
    add("--quick", action="store_true", help="about two minutes: fewer rounds and prompts, rougher figures")
    add("--rounds", type=_positive, help=f"rounds of every row (default: {ROUNDS}, quick: {QUICK_ROUNDS})")
    add("--prompts", type=_prompts, help="prompts a round (default: the target's own)")
    add("--writer-rows", type=_positive, help="rows of 16.8 MB in each of the writer's files")
    add("--only", choices=PARTS, help="measure one part alone")
    add("--seed", type=int, default=0, help="of the prompts and of the order within a round")
    add("--dir", type=Path, default=Path(".cache/bench"), help="where to write: its disk is measured")
    add("--save", type=_name, metavar="NAME", help="keep the figures in benchmarks/results/NAME.json")
    told = parser.parse_args(arguments)
    target = TARGETS[told.target]
    return Options(
        target=told.target,
        rounds=told.rounds or (QUICK_ROUNDS if told.quick else ROUNDS),
        prompts=told.prompts or (target.num_quick_prompts if told.quick else target.num_prompts),
        writer_rows=told.writer_rows or (QUICK_WRITER_ROWS if told.quick else WRITER_ROWS),
        parts=(told.only,) if told.only else PARTS,
        seed=told.seed,
        folder=told.dir,
        save=told.save,
    )


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is below 1")
    return number


def _prompts(text: str) -> int:
    number = _positive(text)
    if number < NUM_UNITS:
        raise argparse.ArgumentTypeError(f"{number} prompts do not fill {NUM_UNITS} units")
    return number


def _name(text: str) -> str:
    if not re.fullmatch(NAME_PATTERN, text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a name: small letters, digits, '.', '_' and '-'")
    return text
