"""What every engine row runs: one of two targets, and prompts of random token ids. Pure; free of torch.

Legend: L captured layers, H hidden size.
"""

import itertools
import random
from dataclasses import dataclass

MAX_NUM_BATCHED_TOKENS = 2048
"""Tokens a step, told to every engine: vLLM's own choice depends on the speculative method."""

STATE_BYTES = 2
"""Bytes of one bfloat16."""


@dataclass(frozen=True, slots=True)
class Target:
    """A Llama-shaped model of random weights, and the prompts that suit it. Lengths count tokens."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    layer_ids: tuple[int, ...]
    shortest_prompt: int
    longest_prompt: int
    num_prompts: int
    num_quick_prompts: int

    @property
    def state_bytes_per_token(self) -> int:
        """Return L * H * 2 bytes."""
        return len(self.layer_ids) * self.hidden_size * STATE_BYTES


TARGETS = {
    # About 150 M parameters for 8 KiB of states a token: the engine is the bound, as on a real node.
    "compute": Target(1024, 2816, 12, 16, 8, 64, 4096, (2, 6, 10, 12), 192, 320, 64, 24),
    # Hardly any arithmetic for 32 KiB of states a token: the drain is the bound, as with no real model.
    "drain": Target(4096, 64, 4, 1, 1, 64, 512, (1, 2, 3, 4), 256, 768, 48, 16),
}


@dataclass(frozen=True, slots=True)
class Workload:
    """One row's work in one round; the same for every row and every round."""

    target: Target
    num_prompts: int
    num_units: int
    seed: int

    def prompts(self) -> list[tuple[int, ...]]:
        """Return the token ids of every prompt; lengths are spread evenly over the target's range."""
        draw = random.Random(self.seed)
        vocab = range(self.target.vocab_size)
        lengths = [
            draw.randint(self.target.shortest_prompt, self.target.longest_prompt)
            for _ in range(self.num_prompts)
        ]
        return [tuple(draw.choices(vocab, k=length)) for length in lengths]

    def units(self) -> list[list[tuple[int, ...]]]:
        """Return the prompts cut into `num_units` runs of consecutive ones, equal but for one prompt."""
        prompts = self.prompts()
        bounds = [len(prompts) * index // self.num_units for index in range(self.num_units + 1)]
        return [prompts[begin:end] for begin, end in itertools.pairwise(bounds)]
