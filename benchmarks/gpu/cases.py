"""The engines whose rows are compared with transformers', and their prompts. Pure; free of torch."""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from benchmarks.workload import Target

if TYPE_CHECKING:
    from schemas.request import Dtype

PARITY_TARGET = Target(1024, 2816, 8, 16, 8, 64, 8192, (0, 2, 4, 6, 8))
"""Embeddings, inner layers, and the last one before the final norm."""
TINY_TARGET = Target(256, 512, 4, 4, 2, 64, 512, (0, 1, 2, 3, 4))
"""To try the commands out; no figure of it means anything."""

BORDER_LENGTHS = (1, 15, 16, 17, 129, 513, 2000)
"""Around the borders of blocks, and beyond one step's tokens."""
NUM_RANDOM_LENGTHS = 24
SHARED_PREFIX_TOKENS = 600
TAIL_LENGTHS = (1, 15, 16, 17, 300)
NUM_ANSWERED = 36
"""Prompts that are answered."""

OPTIONS: dict[str, Any] = {
    # The long prompts take several steps, each of which a graph was captured for: vLLM captures up to four
    # times the requests, since a request may bring a draft.
    "max_num_batched_tokens": 512,
    "max_num_seqs": 128,
    "kv_cache_memory_bytes": 2 * 2**30,
    "gpu_memory_utilization": 0.1,
    "disable_log_stats": False,
}


@dataclass(frozen=True, slots=True)
class Case:
    """One engine. Without `options` it is what the service would start."""

    architecture: str
    dtype: "Dtype"
    options: Mapping[str, bool | int] = field(default_factory=dict)
    pool_bytes: int = 2**30
    answer_tokens: int = 0
    """Tokens that each prompt is answered with; 0 is prefill alone."""


EAGER = {"enforce_eager": True}
CASES = {
    "llama-float32": Case("llama", "float32", EAGER),
    "qwen3-float32": Case("qwen3", "float32", EAGER),
    "qwen3-moe-float32": Case("qwen3_moe", "float32", EAGER),
    "answers-float32": Case("llama", "float32", EAGER, answer_tokens=20),
    "llama-bfloat16": Case("llama", "bfloat16"),
    # A job's steps: compiled, and of more tokens than any graph was captured for.
    "llama-bfloat16-large-steps": Case("llama", "bfloat16", {"max_num_batched_tokens": 16_384}),
    "qwen3-bfloat16": Case("qwen3", "bfloat16"),
    "qwen3-moe-bfloat16": Case("qwen3_moe", "bfloat16"),
    # Sliding windows: caches in several groups, whose blocks behind a window are the one that padding is in.
    "gemma3-bfloat16": Case("gemma3_text", "bfloat16"),
    # The pool holds one long prompt: the others wait in the engine's cache.
    "llama-float16-small-pool": Case("llama", "float16", EAGER, pool_bytes=2**16),
}


def prompt_units(case: Case, vocab_size: int) -> list[list[list[int]]]:
    """Return the prompts of each unit: new ones; then the same again, and tails on a shared prefix."""
    draw = random.Random(0)

    def prompt(length: int) -> list[int]:
        return draw.choices(range(vocab_size), k=length)

    if case.answer_tokens:
        return [[prompt(draw.randint(5, 200)) for _ in range(NUM_ANSWERED)]]
    lengths = [*BORDER_LENGTHS, *(draw.randint(2, 700) for _ in range(NUM_RANDOM_LENGTHS))]
    draw.shuffle(lengths)
    first = [prompt(length) for length in lengths]
    shared = max(first, key=len)[:SHARED_PREFIX_TOKENS]
    return [first, [*first, *(shared + prompt(length) for length in TAIL_LENGTHS)]]
