"""All that decides a loop: its targets, its questions, and the two ways to draft."""

import dataclasses
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from examples.tiny_target import Recipe, conversations

NUM_LAYERS = 8
AUX = (2, NUM_LAYERS // 2, NUM_LAYERS - 3)
"""What the speculators trainer takes by default: vLLM's ids."""
LAST = NUM_LAYERS
LAYERS = tuple(sorted({*AUX, *(k - 1 for k in AUX), LAST - 1}))
"""Captured: what the drafter takes, and the layer below each of them for the datasets that are wrong."""

TARGET = Recipe(layers=NUM_LAYERS, hidden=128, vocab=1024, dtype="float32", steps=600)
QUESTIONS_SEED = 7


@dataclass(frozen=True, slots=True)
class LoopRecipe:
    """One loop. The drafter never sees the `held_out` questions before it is served."""

    target: Recipe = TARGET
    questions: int = 240
    held_out: int = 48
    answer_tokens: int = 96
    epochs: int = 4
    batch_tokens: int = 512
    draft_vocab: int = 768
    drafted: int = 3
    learning_rate: float = 3e-3
    seeds: tuple[int, ...] = (0, 1)
    steps: int | None = None
    """All drafters take so many, of as many epochs as that needs; unset: all `epochs`."""


SHORT = LoopRecipe(
    target=dataclasses.replace(TARGET, steps=300),
    questions=120,
    held_out=24,
    answer_tokens=64,
    epochs=6,
    seeds=(0,),
)
"""The same loop in minutes: enough to tell right from wrong, too little for a figure."""


@dataclass(frozen=True, slots=True)
class Method:
    """One way to draft on the states of EAGLE-3's layers, all served by vLLM's `eagle3`."""

    trainers: str
    """The trainer's `--speculator-type`."""
    depth: str
    """The trainer's option for how many tokens a drafter drafts."""
    title: str
    prefix: str = ""
    """Begins the names of its drafters' stages after `trained-`."""
    serving: Mapping[str, bool] = field(default_factory=dict)
    """Put into vLLM's speculative config."""


EAGLE3 = Method("eagle3", "--ttt-steps", "EAGLE-3")
PEAGLE = Method("peagle", "--num-depths", "P-EAGLE", "peagle-", {"parallel_drafting": True})
"""All tokens in one pass: after the first, each is drafted from a mask token and a trained mask state."""


def split(questions: int, held_out: int) -> tuple[list[str], list[str]]:
    """Return user turns of the demo's conversations for the training, and others for the serving.

    Raises ValueError: there are not so many different questions.
    """
    asked = [turn["content"] for turns in conversations() for turn in turns if turn["role"] == "user"]
    different = sorted(set(asked))
    if questions + held_out > len(different):
        raise ValueError(f"{questions} + {held_out} questions are asked for; there are {len(different)}")
    random.Random(QUESTIONS_SEED).shuffle(different)
    return different[held_out : held_out + questions], different[:held_out]


def talks(count: int, most_turns: int) -> list[list[list[dict[str, Any]]]]:
    """Return the demo's conversations of two or more questions, cut to the first ones, in a drawn order.

    Each is a list of turns: the messages up to a question, and the source's answer where there is one.

    Raises ValueError: there are not so many.
    """
    found = []
    for messages in conversations():
        turns: list[list[dict[str, Any]]] = [[]]
        for message in messages:
            if turns[-1] and turns[-1][-1]["role"] == "assistant":
                turns.append([])
            turns[-1].append(message)
        asked = [turn for turn in turns if any(message["role"] == "user" for message in turn)]
        if len(asked) > 1:
            found.append(asked[:most_turns])
    if count > len(found):
        raise ValueError(f"{count} conversations are asked for; there are {len(found)}")
    random.Random(QUESTIONS_SEED).shuffle(found)
    return found[:count]


def question(text: str) -> list[dict[str, Any]]:
    """Return a conversation of one question."""
    return [{"role": "user", "content": text}]
