"""States to store: a trained small target's over real text, as they are and with massive activations put in.

Large models hold a few channels, at the first token and some others, thousands of times as large as the rest
of a state, from an early layer to one of the last (Sun et al., "Massive Activations in Large Language
Models", arXiv:2402.17762: 10,000 times the median in Llama 2 7B). A small model has none, so they are put in
behind its second layer and taken out again behind the last but one.

Legend: T tokens, L captured layers, H hidden size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.tiny_target import Recipe, cached_target, conversations
from service.proof.head_weights import FINAL_NORM_MODULE

RECIPE = Recipe()
LAYERS = (2, 4, 5, 8)
MASSIVE = 10_000.0
"""How many times a median magnitude a massive activation is."""
CHANNELS = (17, 101)
EVERY = 24
"""The first token has them, and every so many."""


@dataclass(frozen=True, slots=True)
class Captured:
    """Rows of token ids and their states [L, T, H], bfloat16, and the target that they are of."""

    target: Path
    ids: list[list[int]]
    states: list[torch.Tensor]


def captured(num_rows: int, *, massive: bool) -> Captured:
    """Run the first conversations of the demo through the target."""
    target = cached_target(RECIPE)
    tokenizer: Any = AutoTokenizer.from_pretrained(target)
    ids = [
        list(tokenizer.apply_chat_template(turns, tokenize=True, return_dict=False))
        for turns in conversations()[:num_rows]
    ]
    model: Any = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16).eval()
    if massive:
        put_in: list[float] = []
        model.model.layers[1].register_forward_hook(partial(_put_in, put_in))
        model.model.layers[-2].register_forward_hook(partial(_take_out, put_in))
    return Captured(target, ids, [_states(model, row) for row in ids])


def _put_in(put_in: list[float], _module: Any, _inputs: Any, output: Any) -> None:  # noqa: ANN401
    """Add massive activations to what a layer gives, of both signs; note how large they are."""
    states = output[0] if isinstance(output, tuple) else output
    put_in[:] = [MASSIVE * float(states.float().abs().median())]
    _add(states, put_in[0])


def _take_out(put_in: list[float], _module: Any, _inputs: Any, output: Any) -> None:  # noqa: ANN401
    """Take away what was put in."""
    _add(output[0] if isinstance(output, tuple) else output, -put_in[0])


def _add(states: torch.Tensor, most: float) -> None:
    for place, channel in enumerate(CHANNELS):
        states[..., ::EVERY, channel] += (-1) ** place * most


def _states(model: Any, ids: Sequence[int]) -> torch.Tensor:  # noqa: ANN401 - transformers' model
    seen: dict[str, torch.Tensor] = {}
    norm = next(part for name, part in model.named_modules() if FINAL_NORM_MODULE.fullmatch(name))
    hook = norm.register_forward_pre_hook(lambda _, args: seen.update(before=args[0]))
    try:
        with torch.inference_mode():
            said = model(torch.tensor([list(ids)]), output_hidden_states=True, use_cache=False)
    finally:
        hook.remove()
    layers = (*said.hidden_states[:-1], seen["before"])
    return torch.stack([layers[layer_id][0] for layer_id in LAYERS]).clone()
