"""What the engine's time goes to in a job of the service: `python -m benchmarks.job --save`.

One worker runs jobs of many samples on the compute-bound target at default settings, checks and publication
included, the canary left out. The engine's worker process records when each of its calls begins and ends.
Between them it waits for the scheduler, for samples, or for us: on a CPU a call ends when its work is
computed, so the rest is idle. Every check of ours records its core seconds, in the engine's process and here.

`--long` adds a job of ten times the samples: is it as fast, and does it need the same memory?
"""

import asyncio
import contextlib
import itertools
import json
import os
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from unittest.mock import patch

import psutil
import torch
from vllm.v1.engine.logprobs import LogprobsProcessor

from benchmarks.harness import command, command_line, keep, markdown, positive, say, set_environment
from benchmarks.job_connector import FILE, costed
from benchmarks.machine import machine_facts
from benchmarks.meter import tree
from benchmarks.weights import write_target
from benchmarks.workload import KINDS, MAX_NUM_BATCHED_TOKENS, TARGETS
from schemas.job import JobState
from schemas.request import ExtractRequest, Storage
from service.capture import unit_run
from service.capture.vllm_engine import VllmEngine
from service.proof.head import Head
from service.settings import Settings
from service.store import jobs
from tests.support.jobs import ENDED, Shop
from tests.support.roles import Capture

TARGET, KIND = TARGETS["compute"], KINDS["typical"]
SAMPLES, WARM_UP, UNITS, TIMES = 256, 16, 16, 10
STEP_CALLS = ("execute_model", "sample_tokens")
JOB_TIMEOUT_S = 3600.0
POLL_S = 0.25


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
    seconds that there were. `peak_rss_bytes` is of all processes, from the job's submission to its end.
    """

    seconds: float
    steps: int
    tokens: int
    cores: int
    idle: float
    longest_s: list[float]
    checks: dict[str, float]
    peak_rss_bytes: int = 0


def calls(lines: Iterable[str]) -> list[Call]:
    """Read the record."""
    parts = (line.split() for line in lines)
    return [
        Call(name, float(begin), float(end), int(tokens), float(cost))
        for name, begin, end, tokens, cost in parts
    ]


def shares(record: Sequence[Call], cores: int, peak_rss_bytes: int = 0) -> Shares:
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
        peak_rss_bytes=peak_rss_bytes,
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
    """Record what the checks of this process cost as well, until the block ends."""
    # The calling thread's share is in check_unit's.
    helpers = max(1, torch.get_num_threads() - 1)
    with record.open("a", buffering=1) as file, ExitStack() as patches:
        for owner, name, threads in (
            (unit_run, "check_unit", 0),
            (LogprobsProcessor, "update_from_output", 0),
            (Head, "gaps", helpers),
        ):
            act = costed(f"{owner.__name__}.{name}", getattr(owner, name), file.write, threads=threads)
            patches.enter_context(patch.object(owner, name, act))
        yield


def measure(folder: Path, count: int, *, long: bool) -> dict[str, Shares]:
    """Run a short job, which is not counted, and two of `count` samples: in small units, and as they come.

    A `long` measurement ends with a job of ten times the samples, in ten times the small units.
    """
    target = folder / "models" / "target"
    write_target(TARGET, target, KIND.longest)
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
    small = count * KIND.mean_tokens * TARGET.state_bytes_per_token // UNITS
    jobs = {"small-units": (count, small), "default-units": (count, Storage().shard_bytes)}
    if long:
        jobs["ten-times"] = (TIMES * count, small)
    measured: dict[str, Shares] = {}
    try:
        with worker(shop) as is_alive, costed_here(record):
            run_job(shop, is_alive, target, "warm-up", WARM_UP, small)
            for name, (samples, shard_bytes) in jobs.items():
                before = len(record.read_text().splitlines())
                peak = run_job(shop, is_alive, target, name, samples, shard_bytes)
                lines = record.read_text().splitlines()[before:]
                measured[name] = shares(calls(lines), len(os.sched_getaffinity(0)), peak)
    finally:
        shop.store.close()
    return measured


@contextmanager
def worker(shop: Shop) -> Iterator[Callable[[], bool]]:
    """Run the capture loop on a thread until the block ends; yield what says whether it still runs."""
    capture = Capture(shop.store, shop.settings, "benchmark")
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=lambda: loop.run_until_complete(capture.run()), name="worker")
    thread.start()
    try:
        yield thread.is_alive
    finally:
        loop.call_soon_threadsafe(capture.stop.set)
        thread.join()
        loop.close()


def run_job(
    shop: Shop, is_alive: Callable[[], bool], target: Path, name: str, count: int, shard_bytes: int
) -> int:
    """Run one job from its submission to its end; return the most resident bytes of all processes.

    Its samples are drawn by its name, so that no two jobs share a prefix. Raises RuntimeError.
    """
    say(f"{name}: {count} samples")
    source = target.parent / f"{name}.jsonl"
    source.write_text("".join(json.dumps(sample) + "\n" for sample in samples(name, count)))
    body = {
        "model": str(target),
        "layers": list(TARGET.layer_ids),
        "source": {"kind": "file", "path": str(source)},
        "storage": {"shard_bytes": shard_bytes},
        "canary": "skip",
    }
    begin, peak = time.monotonic(), 0
    job_id = shop.submit(ExtractRequest.model_validate(body), name)
    shop.plan()
    while (job := shop.store.read(jobs.job, job_id)).state not in ENDED:
        if not is_alive() or time.monotonic() - begin > JOB_TIMEOUT_S:
            raise RuntimeError(f"job {name} is still {job.state}")
        if job.progress.plan_done and job.progress.units_done == job.progress.units_planned:
            shop.publish()
        peak = max(peak, resident_bytes())
        time.sleep(POLL_S)
    if job.state != JobState.COMPLETED or job.progress.samples_written != count:
        raise RuntimeError(f"job {name} ended as {job.state}: {job.problem or job.progress}")
    return peak


def samples(seed: str, count: int) -> Iterator[dict[str, object]]:
    """Yield samples of random token ids."""
    draw = random.Random(seed)
    for number in range(count):
        length = draw.randint(KIND.shortest, KIND.longest)
        yield {"id": str(number), "token_ids": draw.choices(range(TARGET.vocab_size), k=length)}


def resident_bytes() -> int:
    """Return the resident bytes of this process and its children."""
    total = 0
    for process in tree(os.getpid()):
        with contextlib.suppress(psutil.NoSuchProcess):
            total += process.memory_info().rss
    return total


def report(jobs: dict[str, Shares]) -> str:
    """Return a table with a column for each job."""
    checks = sorted({check for job in jobs.values() for check in job.checks})
    lines = [
        ["tokens", *(str(job.tokens) for job in jobs.values())],
        ["steps", *(str(job.steps) for job in jobs.values())],
        ["tokens/s", *(f"{job.tokens / job.seconds:.0f}" for job in jobs.values())],
        ["peak RSS GB", *(f"{job.peak_rss_bytes / 1e9:.2f}" for job in jobs.values())],
        ["engine idle", *(f"{job.idle:.2%}" for job in jobs.values())],
        ["longest wait ms", *(f"{max(job.longest_s, default=0) * 1e3:.0f}" for job in jobs.values())],
        ["all checks, of the cores' seconds", *(f"{sum(job.checks.values()):.3%}" for job in jobs.values())],
        *([check, *(f"{job.checks.get(check, 0):.3%}" for job in jobs.values())] for check in checks),
    ]
    return markdown(["job", *jobs], lines)


def main() -> int:
    """Measure, print the table, keep the figures if asked to; return the exit status."""
    parser = command_line("benchmarks.job", __doc__, save="job")
    parser.add_argument("--samples", type=positive, default=SAMPLES, help=f"default: {SAMPLES}")
    parser.add_argument("--long", action="store_true", help=f"a job of {TIMES} times the samples as well")
    options = parser.parse_args()
    set_environment()
    with tempfile.TemporaryDirectory(prefix="quarry-job-") as folder:
        facts = machine_facts(Path(folder))
        jobs = measure(Path(folder), options.samples, long=options.long)
    print(report(jobs))
    kept = {
        "command": command("benchmarks.job", options),
        "machine": facts,
        "samples": options.samples,
        "small_units": UNITS,
        "jobs": {name: asdict(job) for name, job in jobs.items()},
    }
    keep(options.save, kept)
    return 0


if __name__ == "__main__":
    sys.exit(main())
