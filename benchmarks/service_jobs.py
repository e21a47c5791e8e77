"""Whole jobs on one worker in this process: planned, captured, checked, published as the service does."""

import asyncio
import contextlib
import itertools
import json
import os
import random
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from benchmarks.meter import tree
from benchmarks.workload import Target
from schemas.job import JobState
from schemas.request import ExtractRequest
from service.capture.loop import Capture
from tests.support.jobs import ENDED, Shop

SAMPLE_EVERY_S = 0.25
JOB_TIMEOUT_S = 3600.0


@dataclass(frozen=True, slots=True)
class Work:
    """What a job's samples are: random tokens of `target`, as long as the two bounds say."""

    target: Target
    shortest: int
    longest: int


@dataclass(frozen=True, slots=True)
class Job:
    """A job from its submission to its end.

    `tenths` are mean bytes of all processes in its tenths; `committed` is, for every commit that was seen,
    the seconds since the job's submission and the samples that were committed by then.
    """

    samples: int
    tokens: int
    seconds: float
    tokens_per_s: float
    peak_rss_bytes: int
    tenths: list[float]
    committed: list[tuple[float, int]] = field(default_factory=list)


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


def write_samples(path: Path, work: Work, count: int, seed: str) -> int:
    """Write the seed's samples of random token ids as JSON lines; return their tokens."""
    draw = random.Random(seed)
    num_tokens = 0
    with path.open("w") as file:
        for number in range(count):
            ids = draw.choices(range(work.target.vocab_size), k=draw.randint(work.shortest, work.longest))
            file.write(json.dumps({"id": str(number), "token_ids": ids}) + "\n")
            num_tokens += len(ids)
    return num_tokens


def run_job(
    shop: Shop,
    working: threading.Thread,
    work: Work,
    target: Path,
    count: int,
    shard_bytes: int,
    memory: Memory,
    name: str,
) -> Job:
    """Run one job from its submission to its end, beside a worker. Raises RuntimeError.

    Its samples are those of its name: jobs of one engine need names of their own, or find them cached.
    """
    source = target.parent / f"{name}.jsonl"
    num_tokens = write_samples(source, work, count, name)
    body = ExtractRequest.model_validate(
        {
            "model": str(target),
            "layers": list(work.target.layer_ids),
            "source": {"kind": "file", "path": str(source)},
            "storage": {"shard_bytes": shard_bytes},
            "canary": "skip",
        }
    )
    committed: list[tuple[float, int]] = []
    begin = time.monotonic()
    job_id = shop.submit(body, name)
    shop.plan()
    while (job := shop.store.job(job_id)).state not in ENDED:
        if not working.is_alive() or time.monotonic() - begin > JOB_TIMEOUT_S:
            raise RuntimeError(f"job {name} is still {job.state}")
        if job.progress.samples_written > (committed[-1][1] if committed else 0):
            committed.append((time.monotonic() - begin, job.progress.samples_written))
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
        committed,
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
