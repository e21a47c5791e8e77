"""The nine parts in the order that they are run in, and what each calls; vLLM is imported by these alone."""

import argparse
from collections.abc import Sequence

from benchmarks.gpu.figures import Save

PARTS = {
    "bytes": "the gather's and the sentinels' bytes against the cache, then the rate of the drain; no vLLM",
    "exact": "a Llama in float32, every stored row against transformers",
    "job": "`quarry extract` and `quarry verify` of a bfloat16 model, canary and all checks on: alarms",
    "compiled": "bfloat16 with compiled graphs, another architecture, and answers, against transformers",
    "speed": "an 8B model's shape: plain prefill and Quarry",
    "peers": "the same: the capture alone, and vLLM's example connector",
    "smaller": "the same: Quarry with `planes` and with `fp8`",
    "pressure": "a pool that holds one prompt, and a disk of 0.2 GB/s",
    "drafter": "the part `job`'s dataset read by a trainer's step on the GPU",
}
CASES = {
    "exact": ("llama-float32",),
    "compiled": ("llama-bfloat16", "qwen3-bfloat16", "answers"),
    "pressure": ("llama-float16-small-pool",),
}
"""Of `benchmarks.gpu.cases`, run one after the other."""
ROWS = {
    "speed": ("plain", "quarry"),
    "peers": ("capture", "example"),
    "smaller": ("quarry-planes", "quarry-fp8"),
}
"""Of `benchmarks.catalog`."""


def run_part(part: str, options: argparse.Namespace, save: Save) -> None:
    """Run one part in this process; every figure is saved when it is known."""
    if part == "bytes":
        from benchmarks.gpu.check import check_bytes
        from benchmarks.gpu.drain import measure_drain

        check_bytes(options.cache_gib * 2**30, options.seed, save)
        measure_drain(options.cache_gib * 2**30, options.seed, options.rounds, save)
    for case in CASES.get(part, ()):
        from benchmarks.gpu.parity import measure_parity

        measure_parity(case, options, save)
    if part == "job":
        from benchmarks.gpu.jobs import measure_jobs

        measure_jobs(options, save)
    if part in ROWS:
        from benchmarks.gpu.rates import measure_rates

        measure_rates(ROWS[part], options, save)
    if part == "pressure":
        from benchmarks.gpu.rates import measure_slow_disk

        measure_slow_disk(options, save)
    if part == "drafter":
        from benchmarks.gpu.drafter import measure_drafter

        measure_drafter(options, save)


def in_order(chosen: Sequence[str]) -> list[str]:
    """Return the chosen parts, each once, in the order of `PARTS`."""
    return [part for part in PARTS if part in chosen]
