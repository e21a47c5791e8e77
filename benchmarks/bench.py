"""`make bench`: one interleaved run of every row, one report. Figures are measured, none is asserted."""

import json
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from benchmarks.engine_process import EngineLost, EngineProcess
from benchmarks.machine import machine_facts
from benchmarks.options import NUM_UNITS, Options, parse
from benchmarks.report import (
    ENGINE_ROWS,
    WRITER_ROWS,
    checks_cost,
    checks_line,
    engine_figures,
    engine_table,
    header,
    writer_figures,
    writer_table,
)
from benchmarks.summary import shuffled_rounds
from benchmarks.turns import EngineTurn, WriterTurn
from benchmarks.weights import write_target
from benchmarks.workload import MAX_NUM_BATCHED_TOKENS, TARGETS, Workload

RESULTS = Path(__file__).with_name("results")

ENVIRONMENT = {
    # vLLM reserves one core more for an engine with a connector; left alone, rows would have unequal cores.
    "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
    # GiB of cache an engine: three engines live side by side.
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
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
                result["engines"] = run_engines(options, Path(scratch))
        except EngineLost as error:
            print(error, file=sys.stderr)
            return 1
        if "writer" in options.parts:
            result["writer"] = run_writer(options, Path(scratch))
    if options.save is not None:
        RESULTS.mkdir(exist_ok=True)
        RESULTS.joinpath(f"{options.save}.json").write_text(json.dumps(result, indent=1) + "\n")
    return 0


def run_engines(options: Options, scratch: Path) -> dict[str, object]:
    """Measure the engine rows, print their table, return what is kept. Raises EngineLost."""
    target = TARGETS[options.target]
    work = Workload(target, options.prompts, NUM_UNITS, options.seed)
    num_tokens = sum(map(len, work.prompts()))
    orders = shuffled_rounds(list(ENGINE_ROWS), options.rounds, options.seed)
    turns = measure_engines(work, orders, scratch)
    figures = engine_figures(turns, num_tokens)
    said = (
        f"target {options.target}: {options.prompts} prompts of {target.shortest_prompt} to "
        f"{target.longest_prompt} tokens a round, {num_tokens} together, in {NUM_UNITS} units; "
        f"{target.state_bytes_per_token / 1024:.0f} KiB of states a token; bfloat16, eager, "
        f"no prefix caching, {MAX_NUM_BATCHED_TOKENS} tokens a step; rounds: {options.rounds}"
    )
    cost = checks_cost(turns)
    print(engine_table(figures, said, options.command("engines")), checks_line(cost), sep="\n", flush=True)
    return {
        "workload": asdict(work),
        "tokens_a_round": num_tokens,
        "orders": orders,
        "rounds": {kind: [asdict(turn) for turn in of_kind] for kind, of_kind in turns.items()},
        "summary": {kind: asdict(of_kind) for kind, of_kind in figures.items()},
        "checks": asdict(cost),
    }


def measure_engines(work: Workload, orders: list[list[str]], scratch: Path) -> dict[str, list[EngineTurn]]:
    """Start every engine, warm each up with a round that does not count, run the rounds."""
    weights = scratch / "target"
    write_target(work.target, weights)
    turns: dict[str, list[EngineTurn]] = {kind: [] for kind in ENGINE_ROWS}
    with ExitStack() as running:
        engines = {}
        for kind in ENGINE_ROWS:
            engines[kind] = EngineProcess(kind, work, weights, scratch / kind)
            running.callback(engines[kind].stop)
            _say(f"starting {kind}")
            engines[kind].start()
        for kind, engine in engines.items():
            _say(f"warm-up {kind}: {engine.run(0).seconds:.1f} s")
        for number, order in enumerate(orders, start=1):
            for kind in order:
                turns[kind].append(engines[kind].run(number))
                _say(f"round {number} of {len(orders)} {kind}: {turns[kind][-1].seconds:.1f} s")
    return turns


def run_writer(options: Options, scratch: Path) -> dict[str, object]:
    """Measure the writer rows, print their table, return what is kept."""
    from benchmarks.writer import ROW_BYTES, WriterBench

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
    said = f"one file of {options.writer_rows} rows of {ROW_BYTES / 1e6:.1f} MB; rounds: {options.rounds}"
    print(writer_table(figures, said, options.command("writer")), flush=True)
    return {
        "bytes_a_file": options.writer_rows * ROW_BYTES,
        "orders": orders,
        "rounds": {kind: [asdict(turn) for turn in of_kind] for kind, of_kind in turns.items()},
        "summary": {kind: asdict(of_kind) for kind, of_kind in figures.items()},
    }


def _say(progress: str) -> None:
    print(progress, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
