"""From `quarry extract` to the first captured states: `python -m benchmarks.startup --save`.

A round runs a small job once, from its file to the whole dataset, and beside it vLLM alone, with the same
model and options, to its first answered token. Every process marks when it reaches a stage; nothing of the
program is changed for that, only engine and connector are subclasses (`startup_engine`, `startup_connector`).
The ratio of the two says what is ours. `--before DIR` runs the job of another checkout in the same rounds,
one that has this benchmark too.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.bench import ENVIRONMENT, RESULTS
from benchmarks.machine import machine_facts
from benchmarks.startup_marks import FILE, first_marks
from benchmarks.summary import Spread, paired, shuffled_rounds, spread
from examples.tiny_target import CONVERSATIONS, Recipe
from tests.support.tiny_model import random_target

ROUNDS = 5
RECIPE = {"layers": 12, "hidden": 512}
SAMPLES = 8
MAX_TOKENS = 255
OPTIONS = {"worker_extension_cls": "benchmarks.startup_worker.Marks"}
TURN_TIMEOUT_S = 600.0
LOG_TAIL_CHARS = 3000

QUARRY, BARE, BEFORE = "quarry extract", "vLLM alone", "quarry extract, before"
AT = {
    QUARRY: "the first states are captured",
    BEFORE: "the first states are captured",
    BARE: "the first answer",
}
"""The stage that a row is judged by."""
END = "the process has ended"

Marks = dict[str, float]
"""Seconds from a process's start to each of its stages."""


class Rows:
    """Runs one row once, in a process of its own."""

    def __init__(self, folder: Path, before: Path | None, *, eager: bool) -> None:
        """Make the target and the job in `folder`."""
        self._folder = folder
        self._trees = {QUARRY: Path.cwd(), BARE: Path.cwd()} | ({BEFORE: before} if before else {})
        self._target = random_target(folder / "target", **RECIPE)
        self._options = OPTIONS | ({"enforce_eager": True} if eager else {})
        samples = folder / "samples.jsonl"
        samples.write_text("\n".join(CONVERSATIONS.read_text().splitlines()[:SAMPLES]))
        self._job = folder / "job.json"
        job = {
            "model": str(self._target),
            "source": {"kind": "file", "path": str(samples)},
            "max_tokens": MAX_TOKENS,
            "on_too_long": "truncate",
            "loss": "all",
        }
        self._job.write_text(json.dumps(job))
        self._turns = 0

    @property
    def names(self) -> list[str]:
        """Return the names of all rows."""
        return list(self._trees)

    def run(self, name: str) -> Marks:
        """Return the row's marks. Raises RuntimeError with the end of its output if it failed."""
        self._turns += 1
        folder = self._folder / f"turn-{self._turns}"
        folder.mkdir()
        command, more = self._bare() if name == BARE else self._extract(folder)
        told = {**os.environ, **more, FILE: str(folder / "marks")}
        begin = time.time()
        with (folder / "log").open("wb") as log:
            status = subprocess.run(
                [sys.executable, "-m", *command],
                cwd=self._trees[name],
                env=told,
                stdout=log,
                stderr=log,
                timeout=TURN_TIMEOUT_S,
                check=False,
            ).returncode
        end = time.time()
        if status:
            tail = folder.joinpath("log").read_text(errors="replace")[-LOG_TAIL_CHARS:]
            raise RuntimeError(f"{name!r} ended with {status}:\n{tail}")
        return first_marks(folder.joinpath("marks").read_text().splitlines(), begin) | {END: end - begin}

    def _extract(self, folder: Path) -> tuple[list[str], Mapping[str, str]]:
        told = {
            "QUARRY_ENGINE": "benchmarks.startup_engine:MarkedEngine",
            "QUARRY_ENGINE_OPTIONS": json.dumps(self._options),
            "QUARRY_CPU_KV_CACHE_GIB": ENVIRONMENT["VLLM_CPU_KVCACHE_SPACE"],
        }
        return ["benchmarks.startup_cli", "extract", str(self._job), "--out", str(folder / "out")], told

    def _bare(self) -> tuple[list[str], Mapping[str, str]]:
        options = {
            "model": str(self._target),
            "dtype": Recipe().dtype,
            "max_model_len": MAX_TOKENS + 1,
            "skip_tokenizer_init": True,
            "disable_log_stats": True,
            **self._options,
        }
        # None of our plug-in, either.
        return ["benchmarks.startup_bare", json.dumps(options)], {"VLLM_PLUGINS": ""}


def summary(rounds: Mapping[str, Sequence[Marks]]) -> dict[str, dict[str, object]]:
    """Return for each row the spread of every stage, and of its judged stage against vLLM's in the round."""
    base = [marks[AT[BARE]] for marks in rounds[BARE]]
    return {
        name: {
            "stages_s": {stage: asdict(_spread(told, stage)) for stage in _in_order(told)},
            "ratio": asdict(paired([marks[AT[name]] for marks in told], base)),
        }
        for name, told in rounds.items()
    }


def _spread(told: Sequence[Marks], stage: str) -> Spread:
    return spread(marks[stage] for marks in told)


def _in_order(told: Sequence[Marks]) -> list[str]:
    """Return the stages that every round reached, by their medians."""
    stages = [stage for stage in told[0] if all(stage in marks for marks in told)]
    return sorted(stages, key=lambda stage: _spread(told, stage).median)


def report(found: Mapping[str, Mapping[str, object]]) -> str:
    """Return a table a row."""
    lines = []
    for name, of_row in found.items():
        lines += [name, *(f"  {_line(told)}  {stage}" for stage, told in _stages(of_row).items())]
        ratio = of_row["ratio"]
        assert isinstance(ratio, dict)
        lines.append(f"  {_line(ratio)}  {AT[name]!r} against vLLM alone")
    return "\n".join(lines)


def _stages(of_row: Mapping[str, object]) -> dict[str, dict[str, float]]:
    stages = of_row["stages_s"]
    assert isinstance(stages, dict)
    return stages


def _line(told: Mapping[str, float]) -> str:
    return f"{told['median']:6.2f} ({told['low']:.2f}..{told['high']:.2f})"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, say it, keep it if asked to; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.startup", description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"default: {ROUNDS}")
    parser.add_argument(
        "--compiled", action="store_true", help="let vLLM compile the model, as it does alone"
    )
    parser.add_argument("--before", type=Path, help="another checkout, whose job is run beside ours")
    parser.add_argument("--seed", type=int, default=0, help="of the order within a round")
    parser.add_argument(
        "--save", action="store_true", help=f"keep the figures in {RESULTS.name}/startup.json"
    )
    told = parser.parse_args(arguments)
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    with tempfile.TemporaryDirectory(prefix="quarry-startup-") as folder:
        facts = machine_facts(Path(folder))
        rows = Rows(Path(folder), told.before, eager=not told.compiled)
        orders = shuffled_rounds(rows.names, told.rounds, told.seed)
        for name in rows.names:
            rows.run(name)  # files come into the page cache, compiled code into vLLM's
        rounds: dict[str, list[Marks]] = {name: [] for name in rows.names}
        for order in orders:
            for name in order:
                rounds[name].append(rows.run(name))
    found = summary(rounds)
    print(report(found))
    if told.save:
        kept = {
            "machine": facts,
            "compiled": told.compiled,
            "target": RECIPE,
            "orders": orders,
            "rounds": rounds,
            "summary": found,
        }
        RESULTS.joinpath("startup.json").write_text(json.dumps(kept, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
