"""What every engine row runs: one of two targets, and prompts of random token ids. Pure; free of torch.

Legend: L captured layers, H hidden size.
"""

import itertools
import random
from dataclasses import dataclass

MAX_NUM_BATCHED_TOKENS = 2048
"""Tokens a step of every engine: vLLM's own choice depends on the speculative method."""

STATE_BYTES = 2
"""Bytes of one bfloat16."""

NUM_UNITS = 4
"""Units that a round's prompts are cut into if nothing else is asked for, where there are so many prompts."""


@dataclass(frozen=True, slots=True)
class Target:
    """A Llama-shaped model of random weights, and the tokens of a round that suit its speed."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    layer_ids: tuple[int, ...]
    round_tokens: int = 0

    @property
    def state_bytes_per_token(self) -> int:
        """Return L * H * 2 bytes."""
        return len(self.layer_ids) * self.hidden_size * STATE_BYTES


TARGETS = {
    # About 150 M parameters for 8 KiB of states a token: the engine is the bound, as on a real node.
    "compute": Target(1024, 2816, 12, 16, 8, 64, 4096, (2, 6, 10, 12), 8192),
    # Hardly any arithmetic for 32 KiB of states a token: the drain is the bound, as with no real model.
    "drain": Target(4096, 64, 4, 1, 1, 64, 512, (1, 2, 3, 4), 65_536),
}


@dataclass(frozen=True, slots=True)
class Kind:
    """How prompts look; lengths count tokens.

    The first `shared_tokens` of every prompt are the same in a unit. `answer_tokens` is how many the target
    adds to each. `mean_tokens` decides how many prompts a round has, never fewer than `fewest_prompts`.
    """

    shortest: int
    longest: int
    shared_tokens: int = 0
    answer_tokens: int = 0
    fewest_prompts: int = NUM_UNITS

    @property
    def mean_tokens(self) -> int:
        """Return the tokens of a prompt and its answer, on average. An answered token counts for four."""
        return (self.shortest + self.longest) // 2 + 4 * self.answer_tokens

    @property
    def max_tokens(self) -> int:
        """Return the most tokens that one request may come to."""
        return self.longest + self.answer_tokens


KINDS = {
    "short": Kind(128, 128),
    "typical": Kind(256, 768),
    "long": Kind(8192, 8192, fewest_prompts=2),
    # Three blocks of the CPU build's cache are the same for every prompt of a unit; prefix caching is on.
    "shared": Kind(448, 576, shared_tokens=384),
    "generate": Kind(128, 256, answer_tokens=64),
}


@dataclass(frozen=True, slots=True)
class Workload:
    """One row's work in one round; the same for every row, but for the tokens.

    Every row draws its own in every round: rows of one engine share its prefix cache.
    """

    target: Target
    kind: Kind
    num_prompts: int
    num_units: int
    seed: int

    def lengths(self) -> list[int]:
        """Return the tokens of every prompt, the same in every round, spread evenly over the kind's range."""
        draw = random.Random(self.seed)
        return [draw.randint(self.kind.shortest, self.kind.longest) for _ in range(self.num_prompts)]

    def units(self, row: str, turn: int) -> list[list[tuple[int, ...]]]:
        """Return `row`'s prompts of round `turn`, cut into runs that are equal but for one prompt."""
        draw = random.Random(f"{self.seed} {row} {turn}")
        vocab = range(self.target.vocab_size)
        lengths, units = self.lengths(), []
        num_units = min(self.num_units, len(lengths))
        bounds = [len(lengths) * index // num_units for index in range(num_units + 1)]
        for begin, end in itertools.pairwise(bounds):
            shared = draw.choices(vocab, k=self.kind.shared_tokens)
            units.append(
                [(*shared, *draw.choices(vocab, k=length - len(shared))) for length in lengths[begin:end]]
            )
        return units

    def prompts(self, row: str, turn: int) -> list[tuple[int, ...]]:
        """Return `row`'s prompts of round `turn`, in the order of its units."""
        return [prompt for unit in self.units(row, turn) for prompt in unit]

    def stored_lengths(self) -> list[int]:
        """Return the tokens of every prompt whose states exist in the end.

        That is the prompt, and the answer less its last token, which was never an input.
        """
        return [length + max(self.kind.answer_tokens - 1, 0) for length in self.lengths()]

    @property
    def stored_tokens(self) -> int:
        """Return the tokens with states of a round."""
        return sum(self.stored_lengths())

    @property
    def state_bytes(self) -> int:
        """Return the bytes of a round's states, as they are."""
        return self.stored_tokens * self.target.state_bytes_per_token


def workload(
    target: Target, kind: str, *, num_prompts: int | None, seed: int, num_units: int = NUM_UNITS
) -> Workload:
    """Return the work of a round; `num_prompts` is the target's and the kind's own choice if not given."""
    shape = KINDS[kind]
    prompts = num_prompts or max(shape.fewest_prompts, target.round_tokens // shape.mean_tokens)
    return Workload(target, shape, prompts, num_units, seed)
