"""Whether ten times the samples are captured as fast, and in the same memory: `python -m benchmarks.soak`.

One worker on vLLM runs whole jobs one after the other, as the service does: planned from a file, captured,
checked, published to a folder. N samples go first and are not counted; then come N, 10 N, and N again.
What slows or grows with the length of a job shows in the ratio of rates, or in the memory's tenths.
"""

import argparse
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
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from benchmarks.bench import ENVIRONMENT, RESULTS
from benchmarks.machine import machine_facts
from benchmarks.meter import tree
from benchmarks.table import gigabytes, markdown
from benchmarks.weights import write_target
from benchmarks.workload import Target
from schemas.job import JobState
from schemas.request import ExtractRequest
from service.capture.loop import Capture
from tests.support.jobs import ENDED, Shop

TINY = Target(128, 256, 4, 2, 2, 64, 512, (1, 3, 4), 0, 0)
"""So small that everything around the model is the larger part."""
SHORTEST, LONGEST = 32, 224
SAMPLES, QUICK_SAMPLES, TIMES = 1000, 100, 10
SAMPLE_EVERY_S = 0.25
UNITS = 8
"""Units of a job of N samples; the long one has ten times as many."""
JOB_TIMEOUT_S = 3600.0


@dataclass(frozen=True, slots=True)
class Job:
    """A job from its submission to its end. `tenths` are mean bytes of all processes in its tenths."""

    samples: int
    tokens: int
    seconds: float
    tokens_per_s: float
    peak_rss_bytes: int
    tenths: list[float]


class Memory:
    """Samples the resident bytes of this process and all its children until it is closed."""

    def __init__(self) -> None:
        """Begin to sample."""
        self.samples: list[tuple[float, int]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="memory", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop sampling."""
        self._stop.set()
        self._thread.join()

    def between(self, begin: float, end: float) -> list[tuple[float, int]]:
        """Return the samples of a stretch of `time.monotonic`."""
        return [sample for sample in self.samples if begin <= sample[0] <= end]

    def _sample(self) -> None:
        while not self._stop.wait(SAMPLE_EVERY_S):
            held = 0
            for process in tree(os.getpid()):
                with contextlib.suppress(psutil.NoSuchProcess):
                    held += process.memory_info().rss
            self.samples.append((time.monotonic(), held))


def tenths(samples: Sequence[tuple[float, int]]) -> list[float]:
    """Return the mean of each tenth of the samples, in their order; none of a job that was too short."""
    if len(samples) < 10:
        return []
    bounds = [len(samples) * place // 10 for place in range(11)]
    parts = [samples[begin:end] for begin, end in itertools.pairwise(bounds)]
    return [sum(held for _, held in part) / len(part) for part in parts]


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


def write_samples(path: Path, count: int, seed: int) -> int:
    """Write samples of random token ids as JSON lines; return their tokens."""
    draw = random.Random(seed)
    num_tokens = 0
    with path.open("w") as file:
        for number in range(count):
            ids = draw.choices(range(TINY.vocab_size), k=draw.randint(SHORTEST, LONGEST))
            file.write(json.dumps({"id": str(number), "token_ids": ids}) + "\n")
            num_tokens += len(ids)
    return num_tokens


def run_job(
    shop: Shop,
    working: threading.Thread,
    target: Path,
    count: int,
    shard_bytes: int,
    memory: Memory,
    name: str,
) -> Job:
    """Run one job from its submission to its end, beside a worker. Raises RuntimeError."""
    source = target.parent / f"{name}.jsonl"
    num_tokens = write_samples(source, count, len(name))
    body = ExtractRequest.model_validate(
        {
            "model": str(target),
            "layers": list(TINY.layer_ids),
            "source": {"kind": "file", "path": str(source)},
            "storage": {"shard_bytes": shard_bytes},
            "canary": "skip",
        }
    )
    begin = time.monotonic()
    job_id = shop.submit(body, name)
    shop.plan()
    while (job := shop.store.job(job_id)).state not in ENDED:
        if not working.is_alive() or time.monotonic() - begin > JOB_TIMEOUT_S:
            raise RuntimeError(f"job {name} is still {job.state}")
        if job.progress.plan_done and job.progress.units_done == job.progress.units_planned:
            shop.publish()
        time.sleep(0.02)
    end = time.monotonic()
    job = shop.store.job(job_id)
    if job.state != JobState.COMPLETED or job.progress.samples_written != count:
        raise RuntimeError(f"job {name} ended as {job.state}: {job.problem or job.progress}")
    held = memory.between(begin, end)
    return Job(
        count,
        num_tokens,
        end - begin,
        num_tokens / (end - begin),
        max((rss for _, rss in held), default=0),
        tenths(held),
    )


@contextlib.contextmanager
def worker(shop: Shop) -> Iterator[threading.Thread]:
    """Run the capture loop on a thread of its own, until the block ends."""
    capture = Capture(shop.store, shop.settings, "soak")
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=lambda: loop.run_until_complete(capture.run()), name="worker")
    thread.start()
    try:
        yield thread
    finally:
        loop.call_soon_threadsafe(capture.stop.set)
        thread.join()
        loop.close()


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
                jobs.append(run_job(shop, working, target, samples, shard_bytes, memory, name))
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
