"""What a dataset's states are: whose, of which layers, in which dtype."""

from dataclasses import dataclass

import torch

from schemas.identity import FinalNorm, Provenance


@dataclass(frozen=True, slots=True)
class About:
    """The same of every row. `layer_ids` are vLLM's, ascending; `dtype` is what rows are read in."""

    model: str
    revision: str
    num_layers: int
    layer_ids: tuple[int, ...]
    hidden_size: int
    dtype: torch.dtype
    compression: str
    final_norm: FinalNorm

    @classmethod
    def of(cls, provenance: Provenance) -> "About":
        """Take it from a shard's provenance."""
        identity = provenance.identity
        return cls(
            model=identity.model,
            revision=identity.revision,
            num_layers=identity.num_layers,
            layer_ids=identity.layer_ids,
            hidden_size=identity.hidden_size,
            dtype=getattr(torch, identity.dtype),
            compression=identity.compression,
            final_norm=provenance.final_norm,
        )
