"""A stored row: token ids, mask, and states that are read when they are asked for.

Legend: T tokens, H hidden size.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from schemas.dataset.norm import NormWeights

_NORM_TOKENS = 32
"""Normed at a time: what the steps of a norm leave between them stays in a core's cache, half of the time."""


@dataclass(frozen=True, slots=True)
class Row:
    """Un-shifted: position t holds token t, its mask, and its states.

    `input_ids` is int64 [T], `loss_mask` uint8 [T], 1 where the token is supervised. `read` returns one
    layer's states [T, H] in the stored dtype, the caller's own; a view that asks for one layer costs one
    layer's bytes. `read_many` returns several side by side, [T, len(ids) * H].
    """

    sample_id: str
    source_id: str | None
    prompt_tokens: int
    input_ids: torch.Tensor
    loss_mask: torch.Tensor
    layer_ids: tuple[int, ...]
    num_layers: int
    read: Callable[[int], torch.Tensor]
    norm: NormWeights
    read_many: Callable[[tuple[int, ...]], torch.Tensor] | None = None

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.input_ids)

    @property
    def auxiliary_ids(self) -> tuple[int, ...]:
        """The captured layers below the last one, ascending."""
        return tuple(layer_id for layer_id in self.layer_ids if layer_id != self.num_layers)

    def layer(self, layer_id: int) -> torch.Tensor:
        """Return the states [T, H] after `layer_id` decoder layers (vLLM's id). Raises ReaderError."""
        return self.read(layer_id)

    def last(self) -> torch.Tensor:
        """Return the last layer's states [T, H] before the final norm. Raises ReaderError."""
        return self.read(self.num_layers)

    def last_normed(self) -> torch.Tensor:
        """Return them after the final norm: what the target's head turns into logits. Raises ReaderError."""
        states_TH = self.last()
        return self._normed(states_TH, states_TH)

    def normed(self, states_TH: torch.Tensor) -> torch.Tensor:
        """Return the last layer's states [T, H], which stay as they are, after the final norm."""
        return self._normed(states_TH, torch.empty_like(states_TH))

    def _normed(self, states_TH: torch.Tensor, out_TH: torch.Tensor) -> torch.Tensor:
        for begin in range(0, len(states_TH), _NORM_TOKENS):
            out_TH[begin : begin + _NORM_TOKENS] = self.norm(states_TH[begin : begin + _NORM_TOKENS])
        return out_TH

    def auxiliary(self, layer_ids: tuple[int, ...] | None = None) -> torch.Tensor:
        """Return auxiliary states side by side in ascending order: [T, len(layer_ids) * H].

        All auxiliary layers if none are named. Raises ReaderError.
        """
        chosen = self.auxiliary_ids if layer_ids is None else tuple(sorted(layer_ids))
        if self.read_many is not None:
            return self.read_many(chosen)
        return torch.cat([self.read(layer_id) for layer_id in chosen], dim=-1)
