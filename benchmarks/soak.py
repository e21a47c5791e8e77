"""Whether ten times the samples are captured as fast, and in the same memory: `python -m benchmarks.soak`.

One worker on vLLM runs whole jobs one after the other, as the service does: planned from a file, captured,
checked, published to a folder. A round is one job of 10 N samples in the middle of ten jobs of N, so that
both sides have the same work and a machine that slows down hits both. What slows or grows with the length of
a job shows in the ratio of rates, in the long job's pace, or in its memory's tenths; what each job leaves
behind shows in the memory of the last short job.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.bench import ENVIRONMENT, RESULTS
from benchmarks.machine import machine_facts
from benchmarks.service_jobs import Job, Memory, Work, run_job, worker
from benchmarks.summary import Spread, spread
from benchmarks.table import gigabytes, markdown
from benchmarks.weights import write_target
from benchmarks.workload import Target
from tests.support.jobs import Shop

TINY = Target(128, 256, 4, 2, 2, 64, 512, (1, 3, 4), 0, 0)
"""So small that everything around the model is the larger part."""
SHORTEST, LONGEST = 32, 224
WORK = Work(TINY, SHORTEST, LONGEST)
SAMPLES, QUICK_SAMPLES, TIMES = 1000, 100, 10
ROUNDS, QUICK_ROUNDS = 5, 1
UNITS = 8
"""Units of a job of N samples; the long one has ten times as many."""


@dataclass(frozen=True, slots=True)
class Round:
    """One long job, and the short ones before and after it, as many samples together."""

    short: list[Job]
    long: Job


def growth(job: Job) -> float:
    """Return the last tenth's memory in units of the second's: buffers have been touched by then.

    Raises ValueError for a job that was too short to tell.
    """
    return _tenths(job)[-1] / _tenths(job)[1]


def held(job: Job) -> float:
    """Return the mean memory of a job. Raises ValueError for one that was too short to tell."""
    return sum(_tenths(job)) / len(_tenths(job))


def _tenths(job: Job) -> list[float]:
    if not job.tenths:
        raise ValueError(f"a job of {job.seconds:.1f} s is too short to see what its memory does")
    return job.tenths


def rate_ratio(of_round: Round) -> float:
    """Return the long job's rate in units of the short ones' together."""
    seconds = sum(job.seconds for job in of_round.short)
    return of_round.long.tokens_per_s / (sum(job.tokens for job in of_round.short) / seconds)


def pace(job: Job) -> float:
    """Return the rate of commits from half to nine tenths of a job, in units of that from a tenth to half.

    The start and the end of a job are in neither. Raises ValueError for a job with too few commits.
    """
    marks = [
        next((mark for mark in job.committed if mark[1] >= share * job.samples), None)
        for share in (0.1, 0.5, 0.9)
    ]
    if None in marks or len(set(marks)) < len(marks):
        raise ValueError(f"{len(job.committed)} commits are too few to see a job's pace")
    (early, first), (middle, half), (late, last) = filter(None, marks)
    return ((last - half) / (late - middle)) / ((half - first) / (middle - early))


def summary(rounds: Sequence[Round]) -> dict[str, Spread]:
    """Return what is said of the rounds."""
    return {
        "rate_ratio": spread(map(rate_ratio, rounds)),
        "pace": spread(pace(of_round.long) for of_round in rounds),
        "growth": spread(growth(of_round.long) for of_round in rounds),
        "drift": spread([held(rounds[-1].short[-1]) / held(rounds[0].short[0])]),
        "peak_against_short": spread(
            of_round.long.peak_rss_bytes / max(job.peak_rss_bytes for job in of_round.short)
            for of_round in rounds
        ),
    }


SAID = {
    "rate_ratio": f"tokens/s of a job of {TIMES} times the samples, in units of the short jobs'",
    "pace": "rate of the long job's second half in units of its first half's, without its start and its end",
    "growth": "memory of all processes in the long job's last tenth, in units of its second tenth",
    "drift": "memory of the last short job of all, in units of the first one's",
    "peak_against_short": "peak of it in the long job, in units of the largest peak of a short one",
}


def measure(folder: Path, count: int, num_rounds: int) -> list[Round]:
    """Run the jobs: a short one that is not counted, then the rounds."""
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

            def run(name: str, samples: int) -> Job:
                print(f"{name}: {samples} samples", file=sys.stderr, flush=True)
                return run_job(shop, working, WORK, target, samples, shard_bytes, memory, name)

            run("warm-up", count)
            rounds = []
            for number in range(1, num_rounds + 1):
                before = [run(f"short-{number}-{place}", count) for place in range(TIMES // 2)]
                long = run(f"long-{number}", count * TIMES)
                after = [run(f"short-{number}-{place}", count) for place in range(TIMES // 2, TIMES)]
                rounds.append(Round([*before, *after], long))
        return rounds
    finally:
        memory.close()
        shop.store.close()


def report(rounds: Sequence[Round]) -> str:
    """Return the table, and what the rounds say together."""
    headers = ["samples", "tokens", "seconds", "tokens/s", "peak RSS GB"]
    rows = []
    for of_round in rounds:
        for jobs in (of_round.short, [of_round.long]):
            tokens, seconds = sum(job.tokens for job in jobs), sum(job.seconds for job in jobs)
            samples = f"{len(jobs)} x {jobs[0].samples}" if len(jobs) > 1 else str(jobs[0].samples)
            peak = gigabytes(max(job.peak_rss_bytes for job in jobs))
            rows.append([samples, str(tokens), f"{seconds:.1f}", f"{tokens / seconds:.0f}", peak])
    lines = [
        f"{SAID[name]}: {figure.median:.3f} ({figure.low:.3f}..{figure.high:.3f})"
        for name, figure in summary(rounds).items()
    ]
    return "\n".join([markdown(headers, rows), "", *lines])


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the report, keep the figures if asked to; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    parser.add_argument("--samples", type=int, help=f"N (default: {SAMPLES}, quick: {QUICK_SAMPLES})")
    parser.add_argument("--rounds", type=int, help=f"default: {ROUNDS}, quick: {QUICK_ROUNDS}")
    parser.add_argument("--quick", action="store_true", help="fewer samples and rounds, rougher figures")
    parser.add_argument("--save", action="store_true", help=f"keep the figures in {RESULTS.name}/soak.json")
    told = parser.parse_args(arguments)
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    samples = told.samples or (QUICK_SAMPLES if told.quick else SAMPLES)
    with tempfile.TemporaryDirectory(prefix="quarry-soak-") as folder:
        facts = machine_facts(Path(folder))
        rounds = measure(Path(folder), samples, told.rounds or (QUICK_ROUNDS if told.quick else ROUNDS))
    print(report(rounds), flush=True)
    if told.save:
        kept = {
            "machine": facts,
            "rounds": [asdict(of_round) for of_round in rounds],
            "summary": {name: asdict(figure) for name, figure in summary(rounds).items()},
        }
        RESULTS.joinpath("soak.json").write_text(json.dumps(kept, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
