"""What is run on the GPU: targets, engines and prompts. Pure; free of torch."""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from schemas.request import Dtype

Architecture = Literal["llama", "qwen3", "qwen3_moe"]


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder's dimensions and the vLLM ids of the layers that are captured."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    layer_ids: tuple[int, ...]


PARITY_SHAPE = Shape(1024, 2816, 8, 16, 8, 64, 8192, (0, 2, 4, 6, 8))
"""Embeddings, inner layers, and the last one before the final norm."""
SPEED_SHAPE = Shape(4096, 14336, 32, 32, 8, 128, 128256, (2, 16, 29, 32))
"""Llama 3 8B's dimensions: 32 KiB of states a token in bfloat16."""
TINY_SHAPE = Shape(256, 512, 4, 4, 2, 64, 512, (0, 1, 2, 3, 4))
"""For trying the commands out; no figure of it means anything."""
TINY_SPEED_SHAPE = Shape(1024, 256, 4, 4, 2, 64, 512, (1, 2, 3, 4))


BORDER_LENGTHS = (1, 15, 16, 17, 129, 513, 2000)
"""Around the borders of blocks, and beyond one step's tokens."""
NUM_RANDOM_LENGTHS = 24
SHARED_PREFIX_TOKENS = 600
TAIL_LENGTHS = (1, 15, 16, 17, 300)
NUM_DECODED = 36
"""Prompts that are answered."""

COMMON: dict[str, str | int | float | bool | None] = {
    # The long prompts take several steps.
    "max_num_batched_tokens": 512,
    "max_num_seqs": 64,
    "kv_cache_memory_bytes": 2 * 2**30,
    "gpu_memory_utilization": 0.1,
}


@dataclass(frozen=True, slots=True)
class Case:
    """One engine. Without `options` it is what the service would start."""

    architecture: Architecture
    dtype: Dtype
    options: Mapping[str, bool] = field(default_factory=dict)
    pool_bytes: int = 2**30
    new_tokens: int = 0
    """Tokens that each prompt is answered with; 0 is prefill alone."""


EAGER = {"enforce_eager": True}
CASES = {
    "llama-bfloat16": Case("llama", "bfloat16"),
    "llama-float32": Case("llama", "float32", EAGER),
    # The pool holds one long prompt: the others wait in the engine's cache.
    "llama-float16-small-pool": Case("llama", "float16", EAGER, pool_bytes=2**16),
    "qwen3-bfloat16": Case("qwen3", "bfloat16", EAGER),
    "qwen3_moe-float32": Case("qwen3_moe", "float32", EAGER),
    "decode-async": Case("llama", "float32", EAGER, new_tokens=20),
    "decode-sync": Case("llama", "float32", EAGER | {"async_scheduling": False}, new_tokens=20),
}


def prompt_units(case: Case, vocab_size: int) -> list[list[tuple[int, ...]]]:
    """Return the prompts of each unit: new ones; then the same again, and tails on a shared prefix."""
    draw = random.Random(0)

    def prompt(length: int) -> tuple[int, ...]:
        return tuple(draw.choices(range(vocab_size), k=length))

    if case.new_tokens:
        return [[prompt(draw.randint(5, 200)) for _ in range(NUM_DECODED)]]
    lengths = [*BORDER_LENGTHS, *(draw.randint(2, 700) for _ in range(NUM_RANDOM_LENGTHS))]
    draw.shuffle(lengths)
    first = [prompt(length) for length in lengths]
    shared = max(first, key=len)[:SHARED_PREFIX_TOKENS]
    return [first, [*first, *(shared + prompt(length) for length in TAIL_LENGTHS)]]
