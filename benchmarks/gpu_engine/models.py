"""Targets of random weights for the GPU runs, and transformers' own states of them.

Legend: N decoder layers, T tokens, H hidden size.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from benchmarks.gpu_engine.cases import Architecture, Shape
from schemas.request import Dtype

MAX_POSITIONS = 4096

_MORE: dict[Architecture, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 768},
}


def write_model(architecture: Architecture, shape: Shape, dtype: Dtype, folder: Path, device: str) -> None:
    """Write config and weights, made on `device`; norm weights are spread, so that a missing norm shows."""
    disable_progress_bar()
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        architecture,
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        **_MORE[architecture],
    )
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 1:
                weight.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    del model, weight
    if device == "cuda":
        # torch would keep the memory that an engine on the same GPU needs.
        torch.cuda.empty_cache()


class Reference:
    """A transformers model whose states are read at every layer, the last one before the final norm."""

    def __init__(self, folder: Path, dtype: Dtype, device: str) -> None:
        """Load the weights in `folder` as `dtype`."""
        self._device = device
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype), attn_implementation="eager", local_files_only=True
        )
        self._model = self._model.to(device).eval()
        self._before_norm: torch.Tensor | None = None
        self._model.model.norm.register_forward_pre_hook(self._keep)

    def _keep(self, module: torch.nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
        self._before_norm = arguments[0]

    @torch.inference_mode()
    def states(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Return float32 [N + 1, T, H]: entry k is what vLLM calls layer k."""
        ids = torch.tensor([token_ids], device=self._device)
        output = self._model(ids, output_hidden_states=True, use_cache=False)
        assert self._before_norm is not None, "the model has a final norm"
        layers = [*output.hidden_states[:-1], self._before_norm]
        return torch.stack([layer[0].float() for layer in layers])

    @torch.inference_mode()
    def greedy(self, token_ids: Sequence[int], num_tokens: int) -> tuple[int, ...]:
        """Return the `num_tokens` tokens that greedy decoding appends."""
        ids = torch.tensor([token_ids], device=self._device)
        done = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=0,
        )
        return tuple(done[0, len(token_ids) :].tolist())
