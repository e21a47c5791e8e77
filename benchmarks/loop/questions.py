"""What the target answers: user turns of the demo's conversations, alone or after the turns before them."""

import random
from typing import Any

from examples.tiny_target import conversations

SEED = 7


def split(questions: int, held_out: int) -> tuple[list[str], list[str]]:
    """Return questions for the drafter's training, and others that it meets when it is served.

    Raises ValueError: there are not so many different questions.
    """
    asked = [turn["content"] for turns in conversations() for turn in turns if turn["role"] == "user"]
    different = sorted(set(asked))
    if questions + held_out > len(different):
        raise ValueError(f"{questions} + {held_out} questions are asked for; there are {len(different)}")
    random.Random(SEED).shuffle(different)
    return different[held_out : held_out + questions], different[:held_out]


def question(text: str) -> list[dict[str, Any]]:
    """Return a conversation of one question."""
    return [{"role": "user", "content": text}]


def long_prompts(count: int, most_chars: int = 3000) -> list[list[dict[str, Any]]]:
    """Return the longest conversations of at most `most_chars`, up to the last question."""
    asked = [
        turns[: max(place for place, turn in enumerate(turns) if turn["role"] == "user") + 1]
        for turns in conversations()
    ]
    fit = [turns for turns in asked if _chars(turns) <= most_chars]
    return sorted(fit, key=_chars, reverse=True)[:count]


def _chars(turns: list[dict[str, Any]]) -> int:
    return sum(len(turn["content"] or "") for turn in turns)
