"""The small targets: the same recipe is the same target, and its template marks the answers."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from examples.tiny_target import (
    CHAT_TEMPLATE,
    PLAIN_CHAT_TEMPLATE,
    Arch,
    Recipe,
    cached_target,
    conversations,
    make_tokenizer,
)
from tests.support.tiny_model import random_target

SMALL = Recipe(layers=2, hidden=64, vocab=512, steps=2, batch=1, window=16)

TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Which arguments?"},
    {"role": "assistant", "content": None, "tool_calls": [{"name": "signature"}]},
    {"role": "tool", "content": "f(x)"},
    {"role": "assistant", "content": "It takes x."},
]


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("arch", ["llama", "qwen3", "qwen3_moe"])
def test_a_random_target_is_the_same_for_the_same_recipe(arch: Arch, tmp_path: Path) -> None:
    first = random_target(tmp_path / "a", arch=arch, layers=2)
    second = random_target(tmp_path / "b", arch=arch, layers=2)
    other = random_target(tmp_path / "c", arch=arch, layers=2, seed=1)
    assert files(first) == files(second)
    assert files(first)["model.safetensors"] != files(other)["model.safetensors"]


def test_the_template_marks_what_the_model_wrote_with_its_end_tokens() -> None:
    tokenizer = make_tokenizer(SMALL)
    told = tokenizer.apply_chat_template(TURNS, return_dict=True, return_assistant_tokens_mask=True)
    marked = [token for token, mark in zip(told["input_ids"], told["assistant_masks"], strict=True) if mark]
    assert (
        tokenizer.decode(marked)
        == '<tool_call>{"name": "signature"}</tool_call><|im_end|>It takes x.<|im_end|>'
    )


def test_the_plain_template_renders_the_same_text_without_marks() -> None:
    plain = make_tokenizer(replace(SMALL, chat_template=PLAIN_CHAT_TEMPLATE))
    marked = make_tokenizer(replace(SMALL, chat_template=CHAT_TEMPLATE))
    assert "generation -%}" not in PLAIN_CHAT_TEMPLATE
    for prompt in (True, False):
        texts = {
            tokenizer.apply_chat_template(TURNS, tokenize=False, add_generation_prompt=prompt)
            for tokenizer in (plain, marked)
        }
        assert len(texts) == 1


def test_every_conversation_of_the_demo_renders_and_fits() -> None:
    recipe = Recipe()
    tokenizer = make_tokenizer(recipe)
    lengths = [len(tokenizer.apply_chat_template(turns)["input_ids"]) for turns in conversations()]
    assert len(lengths) == 200
    assert max(lengths) < 1024 < recipe.max_position


def test_a_target_is_made_once(tmp_path: Path) -> None:
    first = cached_target(SMALL, tmp_path)
    stamp = first.stat().st_mtime_ns
    assert cached_target(SMALL, tmp_path) == first
    assert first.stat().st_mtime_ns == stamp
    assert json.loads((first / "training.json").read_text())["tokens_seen"] == 32


def test_a_target_that_could_not_be_made_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError):
        cached_target(replace(SMALL, window=10_000_000), tmp_path)
    assert list(tmp_path.iterdir()) == []
