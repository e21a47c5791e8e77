"""What the engine's time goes to in a job of the service: `python -m benchmarks.job --save`.

One worker runs a job of many samples on the compute-bound target at default settings, checks and publication
included, the canary left out. The engine's worker process notes when it begins and ends each call; between
them it waits for the scheduler, for samples, or for us: on a CPU a call ends when its work is computed, so
what is left is idle. Beside it every check of ours tells its core seconds, in the engine's process and here.
"""

import argparse
import itertools
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from unittest.mock import patch

import torch
from vllm.v1.engine.logprobs import LogprobsProcessor

from benchmarks.bench import ENVIRONMENT, RESULTS
from benchmarks.job_connector import FILE, costed
from benchmarks.machine import machine_facts
from benchmarks.service_jobs import Memory, Work, run_job, worker
from benchmarks.weights import write_target
from benchmarks.workload import KINDS, MAX_NUM_BATCHED_TOKENS, TARGETS
from schemas.request import Storage
from service.capture import unit_run
from service.capture.vllm_engine import VllmEngine
from service.proof.head import Head
from service.settings import Settings
from tests.support.jobs import Shop

KIND = KINDS["typical"]
WORK = Work(TARGETS["compute"], KIND.shortest, KIND.longest)
SAMPLES, WARM_UP, UNITS = 256, 16, 16
STEP_CALLS = ("execute_model", "sample_tokens")


class RecordedEngine(VllmEngine):
    """vLLM with the connector that keeps the record."""

    connector_module = "benchmarks.job_connector"


@dataclass(frozen=True, slots=True)
class Call:
    """One call, in seconds of one clock; `tokens` of the step, 0 where it computes none; a check's cost."""

    name: str
    begin: float
    end: float
    tokens: int
    core_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Shares:
    """From the job's first step to its last: how long that is, and what it went to.

    `idle` is the share in which no step ran; a step without tokens lets the connector work, and counts as
    idle. `longest_s` are the longest waits. `checks` are core seconds of each check in units of all core
    seconds that there were: on a machine whose cores the engine keeps busy, the share of the job's time.
    """

    seconds: float
    steps: int
    tokens: int
    cores: int
    idle: float
    longest_s: list[float]
    checks: dict[str, float]


def calls(lines: Iterable[str]) -> list[Call]:
    """Read the record."""
    parts = (line.split() for line in lines)
    return [
        Call(name, float(begin), float(end), int(tokens), float(cost))
        for name, begin, end, tokens, cost in parts
    ]


def shares(record: Sequence[Call], cores: int) -> Shares:
    """Sum up the record of one job. Raises ValueError where nothing was computed."""
    busy = list(_computing(record))
    if not busy:
        raise ValueError("the worker computed nothing")
    waits = [after.begin - before.end for before, after in itertools.pairwise(busy)]
    seconds = busy[-1].end - busy[0].begin
    checks: Counter[str] = Counter()
    for call in record:
        if call.name not in STEP_CALLS:
            checks[call.name] += call.core_s / (seconds * cores)
    return Shares(
        seconds=seconds,
        steps=sum(call.name == "execute_model" for call in busy),
        tokens=sum(call.tokens for call in busy),
        cores=cores,
        idle=sum(waits) / seconds,
        longest_s=sorted(waits, reverse=True)[:5],
        checks=dict(checks),
    )


def _computing(record: Iterable[Call]) -> Iterator[Call]:
    """Yield the calls of steps that have tokens; `sample_tokens` belongs to the step before it."""
    computes = False
    for call in record:
        if call.name in STEP_CALLS:
            computes = call.tokens > 0 if call.name == "execute_model" else computes
            if computes:
                yield call


@contextmanager
def costed_here(record: Path) -> Iterator[None]:
    """Let what this process does for the checks tell its cost as well, until the block ends."""
    # The calling thread's share is in check_unit's.
    helpers = max(1, torch.get_num_threads() - 1)
    with record.open("a", buffering=1) as file, ExitStack() as patches:
        for owner, name, threads in (
            (unit_run, "check_unit", 0),
            (LogprobsProcessor, "update_from_output", 0),
            (Head, "opinion", helpers),
            (Head, "gaps", helpers),
        ):
            act = costed(f"{owner.__name__}.{name}", getattr(owner, name), file.write, threads=threads)
            patches.enter_context(patch.object(owner, name, act))
        yield


def measure(folder: Path, count: int) -> dict[str, Shares]:
    """Run a short job, which is not counted, and two of `count` samples: in small units, and as they come."""
    target = folder / "models" / "target"
    write_target(WORK.target, target, WORK.longest)
    record = folder / "calls"
    os.environ[FILE] = str(record)
    shop = Shop.open(
        folder,
        target,
        engine="benchmarks.job:RecordedEngine",
        engine_options={"max_num_batched_tokens": MAX_NUM_BATCHED_TOKENS},
        source_roots=(target.parent,),
        **{name: Settings.model_fields[name].default for name in ("pool_bytes", "poll_s")},
    )
    small = count * KIND.mean_tokens * WORK.target.state_bytes_per_token // UNITS
    cores = len(os.sched_getaffinity(0))
    memory = Memory()
    found = {}
    try:
        with worker(shop) as working, costed_here(record):
            run_job(shop, working, WORK, target, WARM_UP, small, memory, "warm-up")
            for name, shard_bytes in {"small-units": small, "default-units": Storage().shard_bytes}.items():
                before = len(record.read_text().splitlines())
                run_job(shop, working, WORK, target, count, shard_bytes, memory, name)
                found[name] = shares(calls(record.read_text().splitlines()[before:]), cores)
    finally:
        memory.close()
        shop.store.close()
    return found


def report(name: str, found: Shares) -> str:
    """Return what was found of a job, in lines."""
    longest = ", ".join(f"{wait * 1e3:.0f}" for wait in found.longest_s)
    checks = [f"  {name:24} {100 * share:6.3f} %" for name, share in sorted(found.checks.items())]
    return "\n".join(
        [
            f"{name}: {found.steps} steps, {found.tokens} tokens in {found.seconds:.1f} s",
            f"the engine's worker was idle for {100 * found.idle:.2f} % of it; longest waits: {longest} ms",
            f"the checks took {100 * sum(found.checks.values()):.2f} % of its {found.cores} cores' seconds:",
            *checks,
        ]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, say it, keep it if asked to; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.job", description=__doc__)
    parser.add_argument("--samples", type=int, default=SAMPLES, help=f"default: {SAMPLES}")
    parser.add_argument("--save", action="store_true", help=f"keep the figures in {RESULTS.name}/job.json")
    told = parser.parse_args(arguments)
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    with tempfile.TemporaryDirectory(prefix="quarry-job-") as folder:
        facts = machine_facts(Path(folder))
        found = measure(Path(folder), told.samples)
    print("\n".join(report(name, of_job) for name, of_job in found.items()))
    if told.save:
        jobs = {name: asdict(of_job) for name, of_job in found.items()}
        kept = {"machine": facts, "samples": told.samples, "small_units": UNITS, "jobs": jobs}
        RESULTS.joinpath("job.json").write_text(json.dumps(kept, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
