"""The part `speed`: tokens a second of plain prefill and of extraction, by the rows of `benchmarks.bench`.

The engines stay up on the same GPU, each in a process that is stopped by signal while another one runs.
"""

from pathlib import Path
from typing import Any

from benchmarks.bench import run_engines
from benchmarks.harness import shuffled_rounds
from benchmarks.workload import Target, workload

ROWS = ("plain", "plain-v1", "capture", "quarry", "example")
NUM_UNITS = 8

LLAMA_8B = Target(4096, 14336, 32, 32, 8, 128, 128256, (2, 16, 29, 32), 262_144)
"""Llama 3 8B's dimensions: 32 KiB of states a token in bfloat16."""
TINY = Target(1024, 256, 4, 4, 2, 64, 512, (1, 2, 3, 4), 8192)
"""To try the commands out; no figure of it means anything."""

OPTIONS: dict[str, Any] = {
    "enforce_eager": True,
    "max_num_batched_tokens": 8192,
    "max_num_seqs": 256,
    "kv_cache_memory_bytes": 4 * 2**30,
    "gpu_memory_utilization": 0.15,
}
"""Equal for every engine; there is room for five of them in 140 GB."""
TINY_OPTIONS = OPTIONS | {"kv_cache_memory_bytes": 2**29}


def measure_speed(folder: Path, num_rounds: int, seed: int, *, tiny: bool) -> dict[str, Any]:
    """Run every row in shuffled rounds and print the table; shards and files are written below `folder`."""
    work = workload(TINY if tiny else LLAMA_8B, "typical", num_prompts=None, seed=seed, num_units=NUM_UNITS)
    orders = shuffled_rounds(ROWS, num_rounds, seed)
    return run_engines(work, orders, folder, TINY_OPTIONS if tiny else OPTIONS)
