"""Whether ten times the samples are captured as fast, and in the same memory: `python -m benchmarks.soak`.

One worker on vLLM runs whole jobs one after the other, as the service does: planned from a file, captured,
checked, published to a folder. N samples go first and are not counted; then come N, 10 N, and N again.
What slows or grows with the length of a job shows in the ratio of rates, or in the memory's tenths.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.bench import ENVIRONMENT, RESULTS
from benchmarks.machine import machine_facts
from benchmarks.service_jobs import Job, Memory, Work, run_job, worker
from benchmarks.table import gigabytes, markdown
from benchmarks.weights import write_target
from benchmarks.workload import Target
from tests.support.jobs import Shop

TINY = Target(128, 256, 4, 2, 2, 64, 512, (1, 3, 4), 0, 0)
"""So small that everything around the model is the larger part."""
SHORTEST, LONGEST = 32, 224
WORK = Work(TINY, SHORTEST, LONGEST)
SAMPLES, QUICK_SAMPLES, TIMES = 1000, 100, 10
UNITS = 8
"""Units of a job of N samples; the long one has ten times as many."""


def growth(job: Job) -> float:
    """Return the last tenth's memory in units of the second's: buffers have been touched by then.

    Raises ValueError for a job that was too short to tell.
    """
    if not job.tenths:
        raise ValueError(f"a job of {job.seconds:.1f} s is too short to see what its memory does")
    return job.tenths[-1] / job.tenths[1]


def rate_ratio(jobs: Sequence[Job]) -> float:
    """Return the long job's rate in units of the mean of the two around it."""
    before, long, after = jobs
    return long.tokens_per_s / ((before.tokens_per_s + after.tokens_per_s) / 2)


def measure(folder: Path, count: int) -> list[Job]:
    """Run the jobs; return those of N, 10 N and N samples."""
    target = folder / "models" / "target"
    write_target(TINY, target, LONGEST)
    mean = (SHORTEST + LONGEST) // 2
    shop = Shop.open(
        folder,
        target,
        engine="service.capture.vllm_engine:VllmEngine",
        engine_options={"enforce_eager": True, "max_num_batched_tokens": 2048},
        source_roots=(target.parent,),
        pool_bytes=64 * 2**20,
    )
    shard_bytes = max(65_536, count * mean * TINY.state_bytes_per_token // UNITS)
    memory = Memory()
    try:
        with worker(shop) as working:
            jobs = []
            plan = {"warm-up": count, "before": count, "long": count * TIMES, "after": count}
            for name, samples in plan.items():
                print(f"{name}: {samples} samples", file=sys.stderr, flush=True)
                jobs.append(run_job(shop, working, WORK, target, samples, shard_bytes, memory, name))
        return jobs[1:]
    finally:
        memory.close()
        shop.store.close()


def report(jobs: Sequence[Job]) -> str:
    """Return the table, the ratio of rates and what the memory did."""
    headers = ["samples", "tokens", "seconds", "tokens/s", "peak RSS GB"]
    rows = [
        [
            str(job.samples),
            str(job.tokens),
            f"{job.seconds:.1f}",
            f"{job.tokens_per_s:.0f}",
            gigabytes(job.peak_rss_bytes),
        ]
        for job in jobs
    ]
    long = jobs[1]
    held = " ".join(gigabytes(part) for part in long.tenths)
    return "\n".join(
        [
            markdown(headers, rows),
            "",
            f"tokens/s at {TIMES} times the samples: {rate_ratio(jobs):.3f} of the mean before and after",
            f"memory of all processes over the long job's tenths, GB: {held}",
            f"the last tenth is {growth(long):.3f} of the second",
        ]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the report, keep the figures if asked to; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    parser.add_argument("--samples", type=int, help=f"N (default: {SAMPLES}, quick: {QUICK_SAMPLES})")
    parser.add_argument("--quick", action="store_true", help="fewer samples, rougher figures")
    parser.add_argument("--save", action="store_true", help=f"keep the figures in {RESULTS.name}/soak.json")
    told = parser.parse_args(arguments)
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    with tempfile.TemporaryDirectory(prefix="quarry-soak-") as folder:
        facts = machine_facts(Path(folder))
        jobs = measure(Path(folder), told.samples or (QUICK_SAMPLES if told.quick else SAMPLES))
    print(report(jobs), flush=True)
    if told.save:
        kept = {
            "machine": facts,
            "jobs": [asdict(job) for job in jobs],
            "rate_ratio": rate_ratio(jobs),
            "growth": growth(jobs[1]),
        }
        RESULTS.joinpath("soak.json").write_text(json.dumps(kept, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
