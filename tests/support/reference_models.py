"""Tiny random models of several architectures, their states, and what an engine would say of them."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from schemas.dataset.index import Witness
from schemas.identity import FinalNorm
from schemas.request import Dtype
from service.capture.engine import WITNESS_TOKENS
from service.proof.head_weights import FINAL_NORM_MODULE

# Models this small only lose by threads that wait for each other on a busy machine.
torch.set_num_threads(1)

NUM_LAYERS, HIDDEN_SIZE, VOCAB_SIZE = 4, 64, 512

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": 96,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
_KINDS: dict[str, tuple[dict[str, Any], FinalNorm]] = {
    "llama": ({"num_key_value_heads": 2}, FinalNorm(kind="rmsnorm", eps=1e-6)),
    "qwen3": (
        {"num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": True},
        FinalNorm(kind="rmsnorm", eps=1e-6),
    ),
    "gemma2": (
        {
            "num_key_value_heads": 2,
            "head_dim": 16,
            "tie_word_embeddings": True,
            "final_logit_softcapping": 8.0,
        },
        FinalNorm(kind="gemma_rmsnorm", eps=1e-6),
    ),
    "gpt_neox": ({}, FinalNorm(kind="layernorm", eps=1e-5)),
    "granite": ({"num_key_value_heads": 2, "logits_scaling": 4.0}, FinalNorm(kind="rmsnorm", eps=1e-6)),
    "olmo": ({"num_key_value_heads": 2}, FinalNorm(kind="layernorm", eps=1e-5)),
    "cohere": ({"num_key_value_heads": 2}, FinalNorm(kind="layernorm", eps=1e-5)),
}
MODEL_TYPES = tuple(_KINDS)


def edit_config(folder: Path, **changes: Any) -> None:
    """Change values of a saved model's config."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@dataclass(frozen=True, slots=True)
class EngineSays:
    """One sequence through the model: every layer [T, H], N before the final norm; argmax; logprobs [V]."""

    layers: dict[int, torch.Tensor]
    post_norm: torch.Tensor
    next_token: int
    logprobs: torch.Tensor

    @property
    def witness(self) -> Witness:
        best = self.logprobs.topk(WITNESS_TOKENS).indices.tolist()
        # As an engine does, put the argmax first where two tokens are as likely.
        order = [self.next_token, *(token for token in best if token != self.next_token)]
        return tuple((token, float(self.logprobs[token])) for token in order)


class TinyModel:
    """A saved model and the same one in memory, in `dtype`."""

    def __init__(self, folder: Path, model_type: str, dtype: Dtype, *, shard_size: str = "1GB") -> None:
        extra, self.final_norm = _KINDS[model_type]
        config = AutoConfig.for_model(model_type, **(_SHAPE | extra))
        torch.manual_seed(11)
        self.folder = folder
        self.model: Any = AutoModelForCausalLM.from_config(config).to(getattr(torch, dtype)).eval()
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for name, weight in self.model.named_parameters():
                noise = torch.randn(weight.shape, generator=generator)
                around = 0.0 if weight.ndim == 2 or "bias" in name else 1.0
                weight.copy_(around + (0.12 if weight.ndim == 2 else 0.3) * noise)
        self.model.save_pretrained(folder, max_shard_size=shard_size)

    def run(self, token_ids: list[int]) -> EngineSays:
        """Return the states and the next token's log-probabilities, as an engine of this dtype does."""
        seen: dict[str, torch.Tensor] = {}
        norm = next(m for name, m in self.model.named_modules() if FINAL_NORM_MODULE.fullmatch(name))
        hook = norm.register_forward_pre_hook(lambda _, args: seen.update(before=args[0]))
        try:
            with torch.inference_mode():
                output = self.model(torch.tensor([token_ids]), output_hidden_states=True, use_cache=False)
        finally:
            hook.remove()
        states = [states[0].clone() for states in output.hidden_states]
        layers = dict(enumerate(states[:-1])) | {NUM_LAYERS: seen["before"][0].clone()}
        logprobs = torch.log_softmax(output.logits[0, -1].float(), dim=0)
        token = int(logprobs.argmax())
        return EngineSays(layers, states[-1], token, logprobs)
