"""Writer threads fed at a set rate, really and simulated: `python -m benchmarks.writers`.

Rows of one unit after another, as a worker's bound on what is in flight lets them through, go to the
connector's own pool and writers. Prints GB/s of states, the share of time in which so many threads are on a
core or wait for the disk, and when the first unit was sealed. Run it from two trees by turns to compare them.

`--simulate` does it for more threads than a desk has cores: a unit on one thread, the rows of one unit on
several, and units interleaved, one for each thread. Then also: the states of units that a kill would lose.

Legend: L captured layers, T tokens, H hidden size.
"""

import argparse
import heapq
import json
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import torch

from benchmarks.dataset import LAYER_IDS, model_identity
from benchmarks.writer import NUM_TOKENS, ROW_BYTES, SHAPE_LTH
from connector.pool import HostPool
from connector.repeats import RepeatCheck
from connector.wire import DrainJob, RowRef, hash_ids
from connector.writers import CapturedRow, WriterPool
from schemas.receipts import UnitOpened, UnitSealed
from schemas.request import Compression
from tests.support.plans import order, random_ids, rank_config, write_plan
from tests.support.sums import token_sums

UNIT_ROWS = 16
POOL_BYTES = 2**30
SAMPLE_EVERY_S = 0.005
POLICIES = ("a unit on one thread", "rows of a unit on several", "units interleaved")


def measure(compression: Compression, num_threads: int, rate: float, num_units: int) -> dict[str, Any]:
    """Feed `num_units` units at `rate` bytes a second of states; what finds the pool full waits."""
    folder = Path(tempfile.mkdtemp(prefix="quarry-writers-"))
    ids = random_ids([NUM_TOKENS] * UNIT_ROWS)
    for unit in range(num_units):
        write_plan(folder, ids, unit=unit)
    model = model_identity().model_copy(update={"compression": compression})
    draw = torch.Generator().manual_seed(0)
    states = [torch.randn(SHAPE_LTH, generator=draw).to(torch.bfloat16) for _ in range(UNIT_ROWS)]
    sums = [token_sums(one) for one in states]
    pool = HostPool(POOL_BYTES, pinned=False)
    sealed: list[float] = []
    opened = threading.Semaphore(0)

    def send(message: object) -> None:
        if isinstance(message, UnitOpened):
            opened.release()
        elif isinstance(message, UnitSealed):
            sealed.append(time.perf_counter())
        else:
            raise TypeError(message)

    config = replace(rank_config(folder), writer_threads=num_threads)
    pool_of_writers = WriterPool(config, pool, send, RepeatCheck(len(LAYER_IDS), UNIT_ROWS * NUM_TOKENS))
    busy: Counter[int] = Counter()
    stop = threading.Event()
    sampler = threading.Thread(target=lambda: _sample(busy, stop))
    sampler.start()
    begin = time.perf_counter()
    try:
        for number in range(num_units * UNIT_ROWS):
            unit, row = divmod(number, UNIT_ROWS)
            unit_order = order(model, UNIT_ROWS, unit=unit)
            if row == 0:
                pool_of_writers.put(unit_order.attempt_id, unit_order)
                opened.acquire()
            time.sleep(max(0.0, begin + number * ROW_BYTES / rate - time.perf_counter()))
            while (slab := pool.acquire(ROW_BYTES)) is None:
                time.sleep(0.001)
            states_LTH = pool.tensor(slab, torch.bfloat16, SHAPE_LTH)
            states_LTH.copy_(states[row])
            ref = RowRef(unit_order.attempt_id, row, NUM_TOKENS)
            job = DrainJob(str(number), ref, NUM_TOKENS, (), hash_ids(ids[row]), ())
            pool_of_writers.put(unit_order.attempt_id, CapturedRow(job, slab, states_LTH, sums[row]))
        while len(sealed) < num_units:
            time.sleep(0.001)
    finally:
        stop.set()
        sampler.join()
        pool_of_writers.stop()
        shutil.rmtree(folder)
    return {
        "compression": compression,
        "threads": num_threads,
        "gb_s": round(num_units * UNIT_ROWS * ROW_BYTES / 1e9 / (sealed[-1] - begin), 2),
        "first_sealed_s": round(sealed[0] - begin, 2),
        "busy": _shares(busy),
    }


def _sample(busy: Counter[int], stop: threading.Event) -> None:
    while not stop.wait(SAMPLE_EVERY_S):
        states = Counter(
            Path(f"/proc/self/task/{thread.native_id}/stat").read_text().rpartition(")")[2].split()[0]
            for thread in threading.enumerate()
            if thread.name.startswith(("quarry-writer", "quarry-encoder"))
        )
        busy[states["R"] + states["D"]] += 1


def _shares(busy: Counter[int] | Counter[float]) -> dict[int, float]:
    return {int(num): round(part / busy.total(), 2) for num, part in sorted(busy.items())}


@dataclass(frozen=True)
class Costs:
    """Seconds a GB of states: of a core to check and encode, of a file's thread to write what is stored."""

    encode: float
    write: float


COSTS: dict[Compression, Costs] = {
    "none": Costs(encode=0.08, write=0.65),
    "planes": Costs(encode=1.36, write=0.45),
    "fp8": Costs(encode=0.75, write=0.33),
}
"""Rounded, of a desk with two cores and a disk of 1.5 GB/s a file."""


def simulate(policy: str, costs: Costs, num_threads: int, rate: float, num_units: int = 64) -> dict[str, Any]:
    """Play units of 64 rows through a pool of 64; the disk is as fast as its files ask."""
    unit_rows, row_gb = 64, ROW_BYTES / 1e9
    encoders, writers = [0.0] * num_threads, [0.0] * num_threads
    held: list[float] = []
    ends: list[list[float]] = [[] for _ in range(num_units)]
    spans: list[tuple[float, float]] = []
    events: list[tuple[float, float]] = []
    now = 0.0
    for number in range(num_units * unit_rows):
        now += row_gb / rate
        if len(held) == POOL_BYTES // ROW_BYTES:
            now = max(now, heapq.heappop(held))
        unit = number // unit_rows
        if policy == POLICIES[2]:
            unit = number // (unit_rows * num_threads) * num_threads + number % num_threads
        home = unit % num_threads
        if policy == POLICIES[1]:
            begin = max(now, heapq.heappop(encoders))
            encoded = begin + row_gb * costs.encode
            heapq.heappush(encoders, encoded)
            spans.append((begin, encoded))
            begin = max(encoded, writers[home])
            end = begin + row_gb * costs.write
        else:
            begin = max(now, writers[home])
            end = begin + row_gb * (costs.encode + costs.write)
        writers[home] = end
        spans.append((begin, end))
        heapq.heappush(held, end)
        ends[unit].append(end)
        events.append((now, row_gb))
    sealed = sorted(max(unit) for unit in ends)
    lost = _levels([*events, *((max(unit), -row_gb * len(unit)) for unit in ends)])
    busy = _levels([event for begin, end in spans for event in ((begin, 1.0), (end, -1.0))])
    total = sum(busy.values())
    return {
        "policy": policy,
        "threads": num_threads,
        "gb_s": round(num_units * unit_rows * row_gb / sealed[-1], 2),
        "first_sealed_s": round(sealed[0], 2),
        "lost_gb": round(sum(level * part for level, part in lost.items()) / sum(lost.values()), 2),
        "busy_mean": round(sum(level * part for level, part in busy.items()) / total, 1),
    }


def _levels(events: Iterable[tuple[float, float]]) -> dict[float, float]:
    """Return how long each sum of the changes lasted."""
    lasted: dict[float, float] = {}
    level = last = 0.0
    for at, change in sorted(events):
        lasted[level] = lasted.get(level, 0.0) + at - last
        level, last = round(level + change, 6), at
    return lasted


def main() -> None:
    """Print a JSON object for each measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    kinds: tuple[Compression, ...] = get_args(Compression)
    parser.add_argument("--compression", nargs="+", choices=kinds, default=kinds)
    parser.add_argument("--threads", type=int, nargs="+", default=[2])
    parser.add_argument("--rate", type=float, default=1.1, help="GB of states a second (default: 1.1)")
    parser.add_argument("--units", type=int, default=6)
    parser.add_argument("--simulate", action="store_true")
    given = parser.parse_args()
    run: Callable[[Compression, int], list[dict[str, Any]]]
    if given.simulate:

        def run(compression: Compression, threads: int) -> list[dict[str, Any]]:
            costs = COSTS[compression]
            return [
                {"compression": compression, **simulate(policy, costs, threads, given.rate)}
                for policy in POLICIES
            ]
    else:
        torch.set_num_threads(1)

        def run(compression: Compression, threads: int) -> list[dict[str, Any]]:
            return [measure(compression, threads, given.rate * 1e9, given.units)]

    for threads in given.threads:
        for compression in given.compression:
            for figures in run(compression, threads):
                print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
