"""The benchmark's arguments: what is asked for, and the command that asks for it again."""

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.catalog import ROWS, rows_of
from benchmarks.trainers import TRAINERS, has_speculators
from benchmarks.workload import KINDS, NUM_UNITS, TARGETS, Workload, workload

ROUNDS, QUICK_ROUNDS = 5, 2
WRITER_ROWS, QUICK_WRITER_ROWS = 64, 16
PARTS = ("engines", "writer")
NAME_PATTERN = r"[a-z0-9][a-z0-9._-]{0,63}"


@dataclass(frozen=True, slots=True)
class Options:
    """Everything that decides a run, but for the folder it writes in and the name of its results."""

    target: str
    workload: str
    rows: tuple[str, ...]
    quick: bool
    eager: bool
    rounds: int
    prompts: int
    units: int
    writer_rows: int
    parts: tuple[str, ...]
    seed: int
    folder: Path
    ram: Path
    save: str | None

    def work(self) -> Workload:
        """Return what every engine row runs in a round."""
        return workload(
            TARGETS[self.target],
            self.workload,
            quick=self.quick,
            num_prompts=self.prompts,
            seed=self.seed,
            num_units=self.units,
        )

    def command(self, *parts: str) -> str:
        """Return the command that measures the same again, or only `parts` of it."""
        said = [
            f"--target {self.target}",
            f"--workload {self.workload}",
            f"--rows {' '.join(self.rows)}",
            *(["--quick"] if self.quick else []),
            *(["--eager"] if self.eager else []),
            f"--rounds {self.rounds}",
            f"--prompts {self.prompts}",
            f"--units {self.units}",
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
    add("--workload", choices=KINDS, default="typical", help="what the prompts look like (default: typical)")
    add("--rows", nargs="+", choices=ROWS, metavar="ROW", help=f"engine rows beside plain: {', '.join(ROWS)}")
    add("--quick", action="store_true", help="fewer rounds and tokens, shorter long prompts, rougher figures")
    add("--eager", action="store_true", help="do not compile the target: engines start sooner and run slower")
    add("--rounds", type=_positive, help=f"rounds of every row (default: {ROUNDS}, quick: {QUICK_ROUNDS})")
    add("--prompts", type=_positive, help="prompts a round (default: by target and workload)")
    add("--units", type=_positive, default=NUM_UNITS, help="units that they are cut into (default: 4)")
    add("--writer-rows", type=_positive, help="rows of 16.8 MB in each of the writer's files")
    add("--only", choices=PARTS, help="measure one part alone")
    add("--seed", type=int, default=0, help="of the prompts and of the order within a round")
    add("--dir", type=Path, default=Path(".cache/bench"), help="where to write: its disk is measured")
    add("--ram-dir", type=Path, default=Path("/dev/shm"), help="a RAM disk, for the row that writes to one")
    add("--save", type=_name, metavar="NAME", help="keep the figures in benchmarks/results/NAME.json")
    told = parser.parse_args(arguments)
    rows = _rows(parser, told.rows, told.workload)
    work = workload(
        TARGETS[told.target], told.workload, quick=told.quick, num_prompts=told.prompts, seed=told.seed
    )
    if "quarry-ram" in rows and not told.ram_dir.is_dir():
        parser.error("argument --ram-dir: no such folder; name a RAM disk, or leave quarry-ram out of --rows")
    return Options(
        target=told.target,
        workload=told.workload,
        rows=rows,
        quick=told.quick,
        eager=told.eager,
        rounds=told.rounds or (QUICK_ROUNDS if told.quick else ROUNDS),
        prompts=work.num_prompts,
        units=told.units,
        writer_rows=told.writer_rows or (QUICK_WRITER_ROWS if told.quick else WRITER_ROWS),
        parts=(told.only,) if told.only else PARTS,
        seed=told.seed,
        folder=told.dir,
        ram=told.ram_dir,
        save=told.save,
    )


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is below 1")
    return number


def _rows(parser: argparse.ArgumentParser, named: list[str] | None, kind: str) -> tuple[str, ...]:
    """Return the rows to run: a named one that cannot run is refused, a default one is left out."""
    try:
        rows = rows_of(named, kind)
    except ValueError as error:
        parser.error(f"argument --rows: {error}")
    if "speculators" in rows and not has_speculators():
        missing = (
            f"speculators is not installed: 'make {TRAINERS.parent.name}/{TRAINERS.name}/installed' does it"
        )
        if named:
            parser.error(f"argument --rows: {missing}")
        print(f"row speculators is left out: {missing}", file=sys.stderr)
        rows = tuple(row for row in rows if row != "speculators")
    return rows


def _name(text: str) -> str:
    if not re.fullmatch(NAME_PATTERN, text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a name: small letters, digits, '.', '_' and '-'")
    return text
