"""All that decides a loop, but for where it runs."""

import dataclasses
from dataclasses import dataclass

from examples.tiny_target import Recipe

NUM_LAYERS = 8
AUX = (2, NUM_LAYERS // 2, NUM_LAYERS - 3)
"""What the speculators trainer takes when it is not told: vLLM's ids."""
LAST = NUM_LAYERS

TARGET = Recipe(layers=NUM_LAYERS, hidden=128, vocab=1024, dtype="float32", steps=600)
WIDE = Recipe(layers=NUM_LAYERS, hidden=512, vocab=1024, dtype="float32", steps=2)
"""Hardly trained; as wide as it must be for sums to be taken in another order in a batch of another size."""


@dataclass(frozen=True, slots=True)
class LoopRecipe:
    """One loop. The drafter never sees the `held_out` questions before it is served."""

    target: Recipe = TARGET
    wide: Recipe = WIDE
    questions: int = 240
    held_out: int = 48
    answer_tokens: int = 96
    long_prompts: int = 12
    epochs: int = 4
    batch_tokens: int = 512
    draft_vocab: int = 768
    drafted: int = 3
    learning_rate: float = 3e-3
    seeds: tuple[int, ...] = (0, 1)

    def changed(self, **changes: object) -> "LoopRecipe":
        """Return a copy with the values that are not None put in; those of `target` begin with `target_`."""
        told = {name: value for name, value in changes.items() if value is not None}
        target = {
            name.removeprefix("target_"): told.pop(name) for name in list(told) if name[:7] == "target_"
        }
        return dataclasses.replace(self, target=dataclasses.replace(self.target, **target), **told)  # type: ignore[arg-type]


SHORT = LoopRecipe().changed(
    target_steps=300, questions=120, held_out=24, long_prompts=4, answer_tokens=64, epochs=6, seeds=(0,)
)
"""The same loop in minutes: enough to tell right from wrong, too little for a figure."""
