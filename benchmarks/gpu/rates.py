"""The parts that measure rates, on two models' shapes: each row's engine, rounds in turn, every turn saved.

Rows are those of `benchmarks.bench` and count as they do there.
"""

import json
from argparse import Namespace
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from benchmarks.catalog import ROWS
from benchmarks.engine_process import EngineProcess
from benchmarks.gpu.figures import Save
from benchmarks.harness import say, shuffled_rounds
from benchmarks.rows.contract import Site
from benchmarks.weights import write_target
from benchmarks.workload import Target, Workload, workload

NUM_UNITS = 8
LLAMA_8B = Target(4096, 14336, 32, 32, 8, 128, 128256, (2, 16, 29, 32), 262_144)
"""Llama 3 8B's dimensions: 32 KiB of states a token in bfloat16."""
TINY = Target(1024, 256, 4, 4, 2, 64, 512, (1, 2, 3, 4), 8192)
"""To try the commands out; no figure of it means anything."""
LLAMA_1B = Target(2048, 8192, 16, 32, 8, 64, 128256, (2, 8, 13, 16), 262_144)
"""Llama 3.2 1B's dimensions, its head untied: 16 KiB of states a token in bfloat16."""
TARGETS = {"speed": LLAMA_8B, "small": LLAMA_1B}
SLOW_TARGET = Target(4096, 1024, 4, 8, 8, 64, 4096, (1, 2, 3, 4), 65_536)
"""Makes states far faster than the slow disk takes them: 2 GB a round."""

OPTIONS: dict[str, Any] = {
    # What the service has on such a GPU.
    "max_num_batched_tokens": 16384,
    "max_num_seqs": 256,
    "kv_cache_memory_bytes": 8 * 2**30,
    "gpu_memory_utilization": 0.3,
    # Graphs are of at most 512 tokens, which no step here has; without them engines start sooner.
    "compilation_config": {"cudagraph_mode": "NONE"},
}
"""Equal for every engine; four of 28 GB each are up at a time."""
TINY_CACHE = {"kv_cache_memory_bytes": 2**29}
SLOW = "quarry-slow"


def measure_rates(part: str, rows: Sequence[str], options: Namespace, save: Save) -> None:
    """Start the rows' engines, warm each up, run the rounds."""
    run_rows(rows, TINY if options.tiny else TARGETS[part], options, save)


def measure_slow_disk(options: Namespace, save: Save) -> None:
    """Run Quarry on a disk that holds the engine back: no row is lost, and memory stays bounded."""
    run_rows([SLOW], TINY if options.tiny else SLOW_TARGET, options, save)


def run_rows(rows: Sequence[str], target: Target, options: Namespace, save: Save) -> None:
    """Run rows of one target in shuffled rounds; round 0 is the warm-up."""
    if options.round_tokens:
        target = replace(target, round_tokens=options.round_tokens)
    work = workload(target, "typical", num_prompts=None, seed=options.seed, num_units=NUM_UNITS)
    save("workload", asdict(work) | {"tokens": work.stored_tokens, "state_bytes": work.state_bytes})
    weights = kept_target(work, options.weights or options.folder)
    engine_options = OPTIONS | {"enforce_eager": options.eager} | (TINY_CACHE if options.tiny else {})
    with ExitStack() as running:
        engines: dict[str, EngineProcess] = {}
        for name in dict.fromkeys(ROWS[row].engine for row in rows):
            site = Site(work, weights, options.folder / options.parts[0] / name, engine_options)
            engines[name] = EngineProcess(name, site)
            running.callback(engines[name].stop)
        say(f"starting {', '.join(engines)}")
        with ThreadPoolExecutor() as starting:
            list(starting.map(EngineProcess.start, engines.values()))
        for number, order in enumerate([list(rows), *shuffled_rounds(rows, options.rounds, options.seed)]):
            for row in order:
                turn = engines[ROWS[row].engine].run(row, number)
                rates = {
                    "tokens_per_s": round(work.stored_tokens / turn.seconds),
                    "tokens_per_s_until_answered": round(work.stored_tokens / max(turn.answered_s, 1e-9)),
                    "states_gb_per_s": round(work.state_bytes / turn.seconds / 1e9, 3),
                }
                save(f"{row}, round {number}", rates | asdict(turn))


def kept_target(work: Workload, folder: Path) -> Path:
    """Return the weights' folder, written once for all parts that run here one after the other."""
    facts = json.dumps([asdict(replace(work.target, round_tokens=0)), work.kind.max_tokens])
    weights = folder / f"target-{sha256(facts.encode()).hexdigest()[:12]}"
    if not weights.exists():
        partial = weights.with_suffix(".partial")
        write_target(work.target, partial, work.kind.max_tokens)
        partial.rename(weights)
    return weights
