"""Copies a state that a model would otherwise return as it is and that later layers would overwrite.

vLLM's models return the embeddings without a copy, and that tensor is also their residual stream: on a GPU,
kernels that add in place write every layer's output into it. Layer 0 then holds the states of the last layer
(vLLM 0.32.0, an eager engine on an H100: every row was refused because layers 0 and N were equal). The states
of other layers are sums, which are tensors of their own.
"""

import functools
from typing import Any

import torch
from vllm.model_executor.models.interfaces import EagleModelMixin


def copy_unsummed_states() -> None:
    """Make every model of this process copy a state [T, H] that is not the sum of two tensors."""
    add = EagleModelMixin._maybe_add_hidden_state
    if hasattr(add, "__wrapped__"):
        return

    @functools.wraps(add)
    def add_own(
        self: Any,
        aux_hidden_states: list[torch.Tensor],
        layer_idx: int,
        hidden_states: torch.Tensor,
        residual: torch.Tensor | None,
    ) -> list[torch.Tensor]:
        if residual is None and layer_idx in self.aux_hidden_state_layers:
            hidden_states = hidden_states.clone()
        states: list[torch.Tensor] = add(self, aux_hidden_states, layer_idx, hidden_states, residual)
        return states

    EagleModelMixin._maybe_add_hidden_state = add_own
