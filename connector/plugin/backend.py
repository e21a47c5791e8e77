"""Adds state 0, the first layer's input, to the engine's Transformers backend, which cannot return it itself.

Runs in vLLM's workers. Legend: T tokens of a step, H hidden size.
"""

from typing import Any

import torch
from transformers.utils.output_capturing import OutputRecorder, _active_collector

_KEY = "aux_hidden_state_0"
"""Follows the backend's names for the other states."""


class RecordsInput:
    """A mixin; it goes before the backend's class in the bases."""

    model: Any
    _layer_names: dict[int, str]
    _output_aux_hidden_states_kwargs: dict[str, bool]

    def set_aux_hidden_state_layers(self, layers: tuple[int, ...]) -> None:
        """Set the ids of the states to return, each [T, H], in ascending order."""
        if 0 in layers:
            # Outputs are returned in the order in which they are named, so state 0 is named first. It is not
            # the output of any module: the hook below fills it.
            self.model._can_record_outputs = self.model._can_record_outputs or {}
            self.model._can_record_outputs[_KEY] = OutputRecorder(target_class=None)
            self._output_aux_hidden_states_kwargs[f"output_{_KEY}"] = True
            self.model.get_submodule(self._layer_names[0]).register_forward_pre_hook(_keep_input)
        super().set_aux_hidden_state_layers(tuple(k for k in layers if k))  # type: ignore[misc]


def _keep_input(_: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
    collected = _active_collector.get()
    if collected is not None and _KEY in collected:
        # A copy: a fused norm may add to it in place.
        collected[_KEY].append(inputs[0].clone())
