"""`make bench`: one interleaved run of every row, one report. Figures are measured, none is asserted."""

import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path

from benchmarks.catalog import ROWS, engines_of
from benchmarks.engine_process import EngineLost, EngineProcess
from benchmarks.machine import machine_facts
from benchmarks.options import Options, parse
from benchmarks.report import (
    WRITER_ROWS,
    against_peers,
    checks_cost,
    checks_lines,
    engine_figures,
    engine_table,
    header,
    peers_line,
    stages_table,
    writer_figures,
    writer_table,
)
from benchmarks.summary import shuffled_rounds
from benchmarks.turns import EngineTurn, WriterTurn
from benchmarks.weights import write_target
from benchmarks.workload import MAX_NUM_BATCHED_TOKENS, Workload

RESULTS = Path(__file__).with_name("results")

ENVIRONMENT = {
    # vLLM reserves one core more for an engine with a connector; left alone, rows would have unequal cores.
    "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
    # GiB of cache an engine: as many as seven live side by side.
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    # A step's tensors come back to the next one as they are, and in huge pages. Left alone, glibc gives them
    # back to the kernel after every step, and an engine without arithmetic does little but fault them in.
    "GLIBC_TUNABLES": ":".join(
        f"glibc.malloc.{name}={value}"
        for name, value in (("mmap_threshold", 2**31), ("trim_threshold", 2**32), ("hugetlb", 1))
    ),
    # vLLM ends its workers by signal; what they leave is cleaned up, and need not be announced.
    "PYTHONWARNINGS": "ignore:resource_tracker",
}
"""The same for every row; what the caller has set already stays."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the report, keep the figures if asked to; return the exit status."""
    options = parse(arguments)
    # Engines that are stopped by signal would outlive an end without clean-up.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    options.folder.mkdir(parents=True, exist_ok=True)
    facts = machine_facts(options.folder)
    result: dict[str, object] = {
        "command": options.command(),
        "machine": facts,
        "environment": {name: os.environ[name] for name in ENVIRONMENT},
    }
    print(header(facts, options.command()), flush=True)
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="run-") as scratch:
        try:
            if "engines" in options.parts:
                with ram_folder(options) as ram:
                    result["engines"] = run_engines(options, Path(scratch), ram)
        except EngineLost as error:
            print(error, file=sys.stderr)
            return 1
        if "writer" in options.parts:
            result["writer"] = run_writer(options, Path(scratch))
    if options.save is not None:
        RESULTS.mkdir(exist_ok=True)
        RESULTS.joinpath(f"{options.save}.json").write_text(json.dumps(result, indent=1) + "\n")
    return 0


@contextmanager
def ram_folder(options: Options) -> Iterator[Path]:
    """Yield an empty folder on the RAM disk, or on disk where no row needs one."""
    base = options.ram if "quarry-ram" in options.rows else options.folder
    with tempfile.TemporaryDirectory(dir=base, prefix="quarry-bench-") as folder:
        yield Path(folder)


def run_engines(options: Options, scratch: Path, ram: Path) -> dict[str, object]:
    """Measure the engine rows, print their table, return what is kept. Raises EngineLost."""
    work = options.work()
    orders = shuffled_rounds(list(options.rows), options.rounds, options.seed)
    turns = measure_engines(work, orders, scratch, ram, eager=options.eager)
    figures = engine_figures(turns, work.stored_tokens, work.state_bytes)
    print(engine_table(figures, said(options, work), options.command("engines")), flush=True)
    print(stages_table(turns, len(os.sched_getaffinity(0))), flush=True)
    kept: dict[str, object] = {
        "workload": asdict(work),
        "tokens_a_round": work.stored_tokens,
        "state_bytes_a_round": work.state_bytes,
        "orders": orders,
        "rounds": {kind: [asdict(turn) for turn in of_kind] for kind, of_kind in turns.items()},
        "summary": {kind: asdict(of_kind) for kind, of_kind in figures.items()},
    }
    if "quarry" in turns and (ratios := against_peers(turns)):
        print(peers_line(ratios), flush=True)
        kept["quarry_against_peers"] = {row: asdict(figure) for row, figure in ratios.items()}
    if "unchecked" in turns:
        costs = checks_cost(turns)
        print(checks_lines(costs), flush=True)
        kept["checks"] = {row: asdict(cost) for row, cost in costs.items()}
    return kept


def said(options: Options, work: Workload) -> str:
    """Return the sentence on what every row ran."""
    kind = work.kind
    parts = [
        f"target {options.target}, workload {options.workload}: {work.num_prompts} prompts a round of "
        f"{kind.shortest} to {kind.longest} tokens",
        f"the first {kind.shared_tokens} shared in a unit, prefix caching" if kind.shared_tokens else "",
        f"{kind.answer_tokens} tokens answered to each" if kind.answer_tokens else "",
        f"{work.stored_tokens} tokens with states together, in {min(work.num_units, work.num_prompts)} units",
    ]
    return (
        f"{', '.join(part for part in parts if part)}; "
        f"{work.target.state_bytes_per_token / 1024:.0f} KiB of states a token; bfloat16, "
        f"{'eager' if options.eager else 'compiled'}, {MAX_NUM_BATCHED_TOKENS} tokens a step; "
        f"rounds: {options.rounds}"
    )


def measure_engines(
    work: Workload, orders: list[list[str]], scratch: Path, ram: Path, *, eager: bool
) -> dict[str, list[EngineTurn]]:
    """Start every engine, warm each row up with a round that does not count, run the rounds."""
    from benchmarks.rows.contract import Site

    rows = tuple(row for row in ROWS if row in orders[0])
    weights = scratch / "target"
    write_target(work.target, weights, work.kind.max_tokens)
    turns: dict[str, list[EngineTurn]] = {row: [] for row in rows}
    with ExitStack() as running:
        of_row: dict[str, EngineProcess] = {}
        for name, its_rows in engines_of(rows).items():
            engine = EngineProcess(name, Site(work, weights, scratch / name, ram / name, eager=eager))
            of_row |= dict.fromkeys(its_rows, engine)
            running.callback(engine.stop)
            _say(f"starting {name}")
            engine.start()
        for row, engine in of_row.items():
            _say(f"warm-up {row}: {engine.run(row, 0).seconds:.1f} s")
        for number, order in enumerate(orders, start=1):
            for row in order:
                turns[row].append(of_row[row].run(row, number))
                _say(f"round {number} of {len(orders)} {row}: {turns[row][-1].seconds:.1f} s")
    return turns


def run_writer(options: Options, scratch: Path) -> dict[str, object]:
    """Measure the writer rows, print their table, return what is kept."""
    from benchmarks.writer import NUM_THREADS, ROW_BYTES, WriterBench

    writer = WriterBench(scratch / "writer", options.writer_rows)
    orders = shuffled_rounds(list(WRITER_ROWS), options.rounds, options.seed)
    turns: dict[str, list[WriterTurn]] = {kind: [] for kind in WRITER_ROWS}
    for kind in WRITER_ROWS:
        writer.run(kind)  # warm-up: the first touch of every buffer
    for number, order in enumerate(orders, start=1):
        for kind in order:
            turns[kind].append(writer.run(kind))
            _say(f"round {number} of {len(orders)} {kind}: {turns[kind][-1].seconds:.2f} s")
    figures = writer_figures(turns)
    said = (
        f"{NUM_THREADS} files of {options.writer_rows} rows of {ROW_BYTES / 1e6:.1f} MB each, on one core; "
        f"rounds: {options.rounds}"
    )
    print(writer_table(figures, said, options.command("writer")), flush=True)
    return {
        "files": NUM_THREADS,
        "bytes_a_file": options.writer_rows * ROW_BYTES,
        "orders": orders,
        "rounds": {kind: [asdict(turn) for turn in of_kind] for kind, of_kind in turns.items()},
        "summary": {kind: asdict(of_kind) for kind, of_kind in figures.items()},
    }


def _say(progress: str) -> None:
    print(progress, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
