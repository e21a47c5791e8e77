"""Rows of the dataset as a drafter is asked about them.

Legend: T tokens, F fed features, K drafted tokens, R places.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from service.diagnose.setting import Setting
from service.diagnose.target import Target
from service.reader import Row

OWN_SHARE = 0.97
"""Of an answer's tokens: rounding alone makes another token the likeliest now and then."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One row. A server may draft at `places_R`, ascending: token t + 1 is supervised.

    `begins_R` marks the first place of each answer. `top_T` is what the target says after each token.
    """

    number: int
    row: Row
    top_T: torch.Tensor
    places_R: torch.Tensor
    begins_R: torch.Tensor

    @property
    def fed_R(self) -> torch.Tensor:
        """The token that is fed at each place."""
        return self.row.input_ids[self.places_R + 1]

    @property
    def own_share(self) -> float:
        """How much of the answers the target itself would have said."""
        return float((self.top_T[self.places_R] == self.fed_R).float().mean())

    def drafted_at(self, steps: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the place whose state says each drafted token [K, R], and whether it is inside the row."""
        of_KR = self.places_R + 1 + torch.arange(steps)[:, None]
        return of_KR, of_KR < self.row.num_tokens

    def thinned(self, places: int) -> "Asked":
        """Return the row with so many of its places at most, evenly spread."""
        step = -(-len(self.places_R) // places)
        return replace(self, places_R=self.places_R[::step], begins_R=self.begins_R[::step])


def asked(number: int, row: Row, target: Target) -> Asked | None:
    """Return the row with what the target says of it; none if a server would never draft in it."""
    mask_T = row.loss_mask.bool()
    places_R = torch.nonzero(mask_T[1:]).flatten()
    if not len(places_R):
        return None
    row = replace(row, read=lru_cache(row.read))  # a layer is asked for by every change
    begins_R = ~mask_T[places_R] | (places_R == 0)
    return Asked(number, row, target.likeliest(row), places_R, begins_R)


def fed(setting: Setting, row: Row, other: Row) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids [T] and states [T, F] of a row as a setting feeds them."""
    index_T = torch.arange(row.num_tokens)
    source = other if setting.states == "other" else row
    layers = [source.layer(k) for k in setting.layers]
    states_TF = torch.cat([source.normed(one) if setting.normed else one for one in layers], dim=-1)
    states_TF = states_TF[(index_T + setting.states_by).clamp(0, len(index_T) - 1) % len(states_TF)].float()
    if setting.dtype:
        states_TF = states_TF.to(getattr(torch, setting.dtype)).float()
    ids_T = (other if setting.tokens == "other" else row).input_ids
    ids_T = ids_T[(index_T + setting.tokens_by).clamp(0, len(index_T) - 1) % len(ids_T)]
    return ids_T, states_TF * setting.scale
