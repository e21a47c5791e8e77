"""The tests' engine with a model in it: states and next tokens are those of a transformers forward pass.

Slower than the pure function of `tests.support.fake_engine`, and what the canary and the logit check need.
Like any engine it computes with the weights that it loaded at its start, whatever their folder holds later.
"""

import hashlib
import threading
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from connector.vector_math import settle_vector_math
from service.capture.engine import WITNESS_TOKENS
from service.proof.head_weights import FINAL_NORM_MODULE
from tests.support.fake_engine import DTYPES, FakeEngine

LOADING = threading.Lock()
"""Held while transformers loads a model, since it sets torch's default dtype for all threads meanwhile."""
_MODELS: dict[tuple[str, str], Any] = {}
"""By the digest of what was loaded, and dtype."""


def _digest(weights: Path) -> str:
    digest = hashlib.sha256()
    for path in (weights / "config.json", *sorted(weights.glob("*.safetensors"))):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _loaded(weights: Path, dtype: str) -> tuple[str, str]:
    """Load a model unless equal files were loaded before; return its key in `_MODELS`."""
    key = (_digest(weights), dtype)
    if key not in _MODELS:
        settle_vector_math()
        with LOADING:
            model = AutoModelForCausalLM.from_pretrained(weights, dtype=DTYPES[dtype]).eval()
        for weight in model.parameters():
            weight.data = weight.data.clone()  # else they are the file's, mapped, and change with it
        if _digest(weights) != key[0]:  # overwritten meanwhile: this model is like no files
            key = (f"{key[0]}-{len(_MODELS)}", dtype)
        _MODELS[key] = model
    return key


@cache
def _forward(loaded: tuple[str, str], token_ids: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return all layers' states, the last before the final norm [N+1, T, H], and the last logits [V]."""
    model = _MODELS[loaded]
    seen: dict[str, torch.Tensor] = {}
    norm = next(part for name, part in model.named_modules() if FINAL_NORM_MODULE.fullmatch(name))
    hook = norm.register_forward_pre_hook(lambda _, args: seen.update(before=args[0]))
    try:
        with torch.inference_mode():
            said = model(torch.tensor([token_ids]), output_hidden_states=True, use_cache=False)
    finally:
        hook.remove()
    states = torch.stack([states[0] for states in (*said.hidden_states[:-1], seen["before"])])
    return states.clone(), said.logits[0, -1].float().clone()


class ModelEngine(FakeEngine):
    """Runs each request by itself."""

    def _load(self) -> None:
        self._loaded = _loaded(self._spec.weights, self._spec.dtype)

    def _states(self, token_ids: list[int]) -> torch.Tensor:
        return self._forward(token_ids)[0][list(self._spec.layer_ids)]

    def _likely(self, token_ids: list[int]) -> tuple[tuple[int, float], ...]:
        best = torch.log_softmax(self._forward(token_ids)[1], dim=0).topk(WITNESS_TOKENS)
        return tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))

    def _forward(self, token_ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        return _forward(self._loaded, tuple(token_ids))
