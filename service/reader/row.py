"""A stored row: token ids, mask, and states that are read on demand.

Legend: T tokens, H hidden size.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Never

import torch

from schemas.dataset.norm import NormWeights
from schemas.identity import FinalNorm, Provenance
from service.reader.errors import ReaderError

_NORM_TOKENS = 32
"""Tokens normed at a time: the norm's intermediate results stay in a core's cache, which halves the time."""


@dataclass(frozen=True, slots=True)
class About:
    """What all rows have in common. `layer_ids` are vLLM's, ascending; `dtype` is that of states as read."""

    model: str
    revision: str
    weights_sha256: str | None
    num_layers: int
    layer_ids: tuple[int, ...]
    hidden_size: int
    compression: str
    dtype: torch.dtype
    final_norm: FinalNorm

    @classmethod
    def of(cls, provenance: Provenance) -> "About":
        """Return the description in a shard's provenance."""
        identity = provenance.identity
        same = identity.model_dump(include=set(cls.__slots__) - {"dtype"})
        return cls(**same, dtype=getattr(torch, identity.dtype), final_norm=provenance.final_norm)


@dataclass(frozen=True, slots=True)
class Row:
    """A row, un-shifted: position t holds token t, its mask, and its states.

    `input_ids` is int64 [T]; `loss_mask` is uint8 [T], 1 where the token is supervised. `read` returns the
    states of the given layers concatenated, [T, len(ids) * H] in the stored dtype, as a copy; reading one
    layer costs one layer's bytes. Pickling a row, as a loader's worker does, reads all its layers.
    """

    sample_id: str
    source_id: str | None
    prompt_tokens: int
    input_ids: torch.Tensor
    loss_mask: torch.Tensor
    layer_ids: tuple[int, ...]
    num_layers: int
    read: Callable[[tuple[int, ...]], torch.Tensor]
    norm: NormWeights

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
        return self.read((layer_id,))

    def last(self) -> torch.Tensor:
        """Return the last layer's states [T, H] before the final norm. Raises ReaderError."""
        return self.layer(self.num_layers)

    def last_normed(self) -> torch.Tensor:
        """Return the last layer's states after the final norm, the head's input. Raises ReaderError."""
        return self.normed(self.last(), in_place=True)

    def normed(self, states_TH: torch.Tensor, *, in_place: bool = False) -> torch.Tensor:
        """Apply the final norm to the last layer's states [T, H], into new memory unless `in_place`."""
        out_TH = states_TH if in_place else torch.empty_like(states_TH)
        for begin in range(0, len(states_TH), _NORM_TOKENS):
            out_TH[begin : begin + _NORM_TOKENS] = self.norm(states_TH[begin : begin + _NORM_TOKENS])
        return out_TH

    def auxiliary(self, layer_ids: tuple[int, ...] | None = None) -> torch.Tensor:
        """Return auxiliary states concatenated in ascending order of layer: [T, len(layer_ids) * H].

        Without `layer_ids`, return all auxiliary layers. Raises ReaderError.
        """
        return self.read(self.auxiliary_ids if layer_ids is None else tuple(sorted(layer_ids)))

    def __reduce__(self) -> tuple[Any, ...]:
        # An open file cannot be pickled, and an error here would make a loader wait forever.
        read: Callable[[tuple[int, ...]], torch.Tensor]
        try:
            read = partial(_layers_of, self.read(self.layer_ids), self.layer_ids)
        except Exception as error:  # noqa: BLE001 - raised when the states are read
            read = partial(_raise, f"{type(error).__name__}: {error}")
        taken = {field.name: getattr(self, field.name) for field in fields(self)} | {"read": read}
        return Row, tuple(taken.values())


def _layers_of(states: torch.Tensor, held_ids: tuple[int, ...], layer_ids: tuple[int, ...]) -> torch.Tensor:
    """Select layers from the states [T, L * H] of all held layers: [T, len(layer_ids) * H], a copy."""
    if missing := sorted(set(layer_ids) - set(held_ids)):
        raise ReaderError(f"the row holds layers {list(held_ids)}, not {missing}")
    places = [held_ids.index(layer_id) for layer_id in layer_ids]
    return states.view(len(states), len(held_ids), -1)[:, places].flatten(1)


def _raise(detail: str, _layer_ids: tuple[int, ...]) -> Never:
    raise ReaderError(f"the row's states could not be read: {detail}")
