"""The parts in the order that they are run in, and what each calls; vLLM is imported by these alone."""

import argparse
from collections.abc import Sequence

from benchmarks.gpu.figures import Save

PARTS = {
    "bytes": "the gather's and the sentinels' bytes against the cache, then the rate of the drain; no vLLM",
    "exact": "float32 of two dense models, a mixture of experts, and answers, against transformers",
    "job": "`quarry extract` and `quarry verify` of a bfloat16 model, canary and all checks on: alarms",
    "suites": "the tests of the engine's hazards, and the drill's plants in its cache, on the GPU",
    "compiled": "the same models in bfloat16 with compiled graphs, and steps too large for one",
    "speed": "an 8B model's shape: plain prefill, the capture, the disk, Quarry, vLLM's example connector",
    "small": "a 1B model's shape: the same",
    "pressure": "a pool that holds one prompt, and a disk of 0.2 GB/s",
    "drafter": "the part `job`'s dataset read by a trainer's step on the GPU",
}
CASES = {
    "exact": ("llama-float32", "qwen3-float32", "qwen3-moe-float32", "answers-float32"),
    "compiled": (
        "llama-bfloat16",
        "llama-bfloat16-large-steps",
        "qwen3-bfloat16",
        "qwen3-moe-bfloat16",
        "gemma3-bfloat16",
    ),
    "pressure": ("llama-float16-small-pool",),
}
"""Of `benchmarks.gpu.cases`, run one after the other."""
_STORED = ("quarry", "quarry-planes", "quarry-fp8", "quarry-memory", "example", "example-synced")
ROWS = {part: ("plain", "capture", "disk", *_STORED, "example-memory") for part in ("speed", "small")}
"""Of `benchmarks.catalog`."""


def run_part(part: str, options: argparse.Namespace, save: Save) -> None:
    """Run one part in this process; every figure is saved when it is known."""
    if part == "bytes":
        from benchmarks.gpu.check import check_bytes
        from benchmarks.gpu.drain import measure_drain

        check_bytes(options.cache_gib * 2**30, options.seed, save)
        measure_drain(options.cache_gib * 2**30, options.seed, options.rounds, save)
    for case in chosen(CASES.get(part, ()), options):
        from benchmarks.gpu.parity import measure_parity

        measure_parity(case, options, save)
    if part == "job":
        from benchmarks.gpu.jobs import measure_jobs

        measure_jobs(options, save)
    if part == "suites":
        from benchmarks.gpu.suites import run_suites

        run_suites(options, save)
    if part in ROWS:
        from benchmarks.gpu.rates import measure_rates

        measure_rates(part, chosen(ROWS[part], options), options, save)
    if part == "pressure" and chosen(["slow-disk"], options):
        from benchmarks.gpu.rates import measure_slow_disk

        measure_slow_disk(options, save)
    if part == "drafter":
        from benchmarks.gpu.drafter import measure_drafter

        measure_drafter(options, save)


def chosen(names: Sequence[str], options: argparse.Namespace) -> list[str]:
    """Return the names that `--only` names, or all."""
    return [name for name in names if not options.only or name in options.only]


def in_order(wanted: Sequence[str]) -> list[str]:
    """Return the chosen parts, each once, in the order of `PARTS`."""
    return [part for part in PARTS if part in wanted]
