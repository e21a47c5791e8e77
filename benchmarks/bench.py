"""`make bench`: interleaved rounds of every row, one report. Figures are measured, none is asserted.

benchmarks/README.md says what each row counts.
"""

import argparse
import os
import re
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.catalog import ROWS, rows_of
from benchmarks.engine_process import EngineLost, EngineProcess
from benchmarks.harness import (
    ENVIRONMENT,
    command,
    command_line,
    keep,
    kept_rounds,
    positive,
    run_rounds,
    say,
    set_environment,
    shuffled_rounds,
)
from benchmarks.machine import machine_facts
from benchmarks.report import (
    WRITER_BASES,
    WRITER_ROWS,
    EngineTurn,
    against_peers,
    engine_figures,
    engine_table,
    rate_figures,
    rate_table,
)
from benchmarks.weights import write_target
from benchmarks.workload import KINDS, TARGETS, Workload, workload

MODULE = "benchmarks.bench"
ROUNDS = 5
PARTS = ("engines", "writer")
NAME_PATTERN = r"[a-z0-9][a-z0-9._-]{0,63}"


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line; a bad one ends the process with status 2 and a line that names the argument."""
    parser = command_line(MODULE, __doc__)
    add = parser.add_argument
    add("--target", choices=TARGETS, default="compute", help="which bound to measure at (default: compute)")
    add("--workload", choices=KINDS, default="typical", help="what the prompts look like (default: typical)")
    add("--rows", nargs="+", choices=ROWS, metavar="ROW", help=f"engine rows beside plain: {', '.join(ROWS)}")
    add("--eager", action="store_true", help="do not compile the target: engines start sooner and run slower")
    add("--rounds", type=positive, default=ROUNDS, help=f"rounds of every row (default: {ROUNDS})")
    add("--prompts", type=positive, help="prompts a round (default: by target and workload)")
    add("--only", choices=PARTS, help="measure one part alone")
    add("--seed", type=int, default=0, help="of the prompts and of the order within a round")
    add("--dir", type=Path, default=Path(".cache/bench"), help="where to write: its disk is measured")
    add("--save", type=_name, metavar="NAME", help="keep the figures in benchmarks/results/NAME.json")
    options = parser.parse_args(arguments)
    options.rows = rows_of(options.rows)
    options.prompts = work_of(options).num_prompts
    return options


def work_of(options: argparse.Namespace) -> Workload:
    """Return what every engine row runs in a round."""
    return workload(
        TARGETS[options.target],
        options.workload,
        num_prompts=options.prompts,
        seed=options.seed,
    )


def _name(text: str) -> str:
    if not re.fullmatch(NAME_PATTERN, text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a name: small letters, digits, '.', '_' and '-'")
    return text


def main() -> int:
    """Measure, print the report, keep the figures if asked to; return the exit status."""
    options = parse()
    # Engines that are stopped by signal would outlive an end without clean-up.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    set_environment()
    options.dir.mkdir(parents=True, exist_ok=True)
    facts = machine_facts(options.dir)
    result: dict[str, Any] = {
        "command": command(MODULE, options),
        "machine": facts,
        "environment": {name: os.environ[name] for name in ENVIRONMENT},
    }
    print(f"$ {result['command']}", *(f"  {name}: {fact}" for name, fact in facts.items()), sep="\n")
    with tempfile.TemporaryDirectory(dir=options.dir, prefix="run-") as scratch:
        try:
            if options.only in (None, "engines"):
                result["engines"] = run_engines(
                    work_of(options),
                    shuffled_rounds(options.rows, options.rounds, options.seed),
                    Path(scratch),
                    {"enforce_eager": options.eager},
                )
        except EngineLost as error:
            say(str(error))
            return 1
        if options.only in (None, "writer"):
            result["writer"] = run_writer(options, Path(scratch))
    keep(options.save, result)
    return 0


def run_engines(
    work: Workload, orders: list[list[str]], scratch: Path, engine_options: Mapping[str, Any]
) -> dict[str, Any]:
    """Measure the engine rows, print their tables, return what is kept. Raises EngineLost."""
    turns = measure_engines(work, orders, scratch, engine_options)
    figures = engine_figures(turns, work.stored_tokens, work.state_bytes)
    peers = against_peers(turns)
    print("", engine_table(figures, peers), sep="\n")
    kept: dict[str, Any] = {
        "workload": asdict(work),
        "tokens_a_round": work.stored_tokens,
        "state_bytes_a_round": work.state_bytes,
        **kept_rounds(orders, turns, figures),
    }
    if peers:
        kept["quarry_against_peers"] = {row: asdict(figure) for row, figure in peers.items()}
    return kept


def measure_engines(
    work: Workload, orders: list[list[str]], scratch: Path, engine_options: Mapping[str, Any]
) -> dict[str, list[EngineTurn]]:
    """Start every engine, warm each row up with a round that does not count, run the rounds."""
    from benchmarks.rows.contract import Site

    rows = [row for row in ROWS if row in orders[0]]
    weights = scratch / "target"
    write_target(work.target, weights, work.kind.max_tokens)
    with ExitStack() as running:
        engines: dict[str, EngineProcess] = {}
        for name in dict.fromkeys(ROWS[row].engine for row in rows):
            engines[name] = EngineProcess(name, Site(work, weights, scratch / name, engine_options))
            running.callback(engines[name].stop)
            say(f"starting {name}")
            engines[name].start()
        return run_rounds(rows, orders, lambda row, number: engines[ROWS[row].engine].run(row, number))


def run_writer(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Measure the writer rows, print their table, return what is kept."""
    from benchmarks.writer import FILE_ROWS, NUM_THREADS, ROW_BYTES, WriterBench

    writer = WriterBench(scratch / "writer")
    orders = shuffled_rounds(list(WRITER_ROWS), options.rounds, options.seed)
    turns = run_rounds(list(WRITER_ROWS), orders, lambda row, _: writer.run(row))
    figures = rate_figures(turns, {row: WRITER_BASES.get(row, row) for row in turns})
    print("", rate_table("writer row", figures, WRITER_ROWS), sep="\n")
    return {
        "files": NUM_THREADS,
        "bytes_a_file": FILE_ROWS * ROW_BYTES,
        **kept_rounds(orders, turns, figures),
    }


if __name__ == "__main__":
    sys.exit(main())
