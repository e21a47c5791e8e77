"""A decoder that also returns the residual stream between its layers, by running the engine's own forward.

Runs in vLLM's workers, eagerly and under torch.compile. The engine's loop is not duplicated here: its forward
is given a view of the decoder whose layers record what passes through them.

Legend: T tokens of a step, H hidden size.
"""

import inspect
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from vllm.model_executor.models.interfaces import EagleModelMixin

LAYER_TAKES = ("positions", "hidden_states")
"""The first parameters of a layer's forward, in every decoder that can be carried."""


class RecordingDecoder(EagleModelMixin):  # type: ignore[misc]  # vLLM is not typed for us
    """A mixin that goes before the engine's decoder in the bases and calls its forward.

    `_maybe_add_hidden_state` is the engine's own: it keeps state k, [T, H], if k was requested.
    """

    engine_forward: ClassVar[Callable[..., Any]]
    """The forward of the engine's decoder, as a static method: it is called with a view of the decoder."""
    sums: ClassVar[bool]
    """Whether the residual stream is the sum of a layer's two outputs; otherwise it is the first output."""
    layers: Any

    # torch.compile marks the dynamic dimensions by these names, so they are spelt out.
    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,  # null without pipeline stages
        inputs_embeds: torch.Tensor | None = None,
        **more: Any,  # what a multimodal model sends along
    ) -> Any:  # with states a pair, as the engine's runner knows it
        """Return the engine's output and the requested states, each [T, H], in ascending order."""
        rest = (input_ids, positions, intermediate_tensors, inputs_embeds)
        if not self.aux_hidden_state_layers:
            return self.engine_forward(self, *rest, **more)
        states: list[torch.Tensor] = []
        view = _View(self, [_Recorded(self, states, k, layer) for k, layer in enumerate(self.layers)])
        hidden_TH = self.engine_forward(view, *rest, **more)
        return hidden_TH, states

    def _set_aux_hidden_state_layers(self, layers: tuple[int, ...]) -> None:
        """Set the ids of the states to return.

        Raises TypeError if a layer's forward does not begin with `LAYER_TAKES`.
        """
        for layer in self.layers:
            takes = tuple(inspect.signature(layer.forward).parameters)[: len(LAYER_TAKES)]
            if takes != LAYER_TAKES:
                raise TypeError(f"{type(layer).__name__} takes {takes}, not {LAYER_TAKES}")
        super()._set_aux_hidden_state_layers(layers)


class _View:
    """The decoder with other layers."""

    def __init__(self, decoder: RecordingDecoder, layers: list["_Recorded"]) -> None:
        self.decoder = decoder
        self.layers = layers

    def __getattr__(self, name: str) -> Any:
        return getattr(self.decoder, name)


class _Recorded:
    """Layer k of a decoder, for one forward pass: keeps state k + 1 and, if k is 0, state 0 as well."""

    def __init__(
        self,
        decoder: RecordingDecoder,
        states: list[torch.Tensor],
        k: int,
        layer: torch.nn.Module,
    ) -> None:
        self.decoder, self.states, self.k, self.layer = decoder, states, k, layer

    def __call__(self, positions: torch.Tensor, hidden_states: torch.Tensor, *rest: Any, **more: Any) -> Any:
        if self.k == 0 and 0 in self.decoder.aux_hidden_state_layers:
            # A copy: without compilation, fused norms add to the first layer's input in place.
            self.states.append(hidden_states.clone())
        out = self.layer(positions, hidden_states, *rest, **more)
        first, second = (out[0], out[1]) if isinstance(out, tuple) else (out, None)
        residual = second if self.decoder.sums else None
        self.decoder._maybe_add_hidden_state(self.states, self.k + 1, first, residual)
        return out
