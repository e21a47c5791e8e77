"""Rows of the dataset, prepared for asking a drafter about them.

Legend: T tokens, F fed features, K drafted tokens, R places.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from service.diagnose.setting import Setting
from service.diagnose.target import TargetWeights
from service.reader import Row

OWN_SHARE = 0.97
"""Share of the tokens that must be the target's own: rounding alone occasionally changes the most likely
token.
"""


@dataclass(frozen=True, slots=True)
class Asked:
    """One row. `places_R`, ascending, are where a server may draft: token t + 1 is supervised.

    `begins_R` marks the first place of each answer. `top_T` is the target's most likely next token after each
    token.
    """

    number: int
    row: Row
    top_T: torch.Tensor
    places_R: torch.Tensor
    begins_R: torch.Tensor

    @property
    def fed_R(self) -> torch.Tensor:
        """The token fed at each place."""
        return self.row.input_ids[self.places_R + 1]

    @property
    def own_share(self) -> float:
        """The share of the answers' tokens that the target itself would have generated."""
        return float((self.top_T[self.places_R] == self.fed_R).float().mean())

    def drafted_at(self, steps: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the position whose state predicts each drafted token [K, R], and if it is in the row."""
        of_KR = self.places_R + 1 + torch.arange(steps)[:, None]
        return of_KR, of_KR < self.row.num_tokens

    def thinned(self, places: int) -> "Asked":
        """Return the row with at most `places` of its places, evenly spaced."""
        step = -(-len(self.places_R) // places)
        return replace(self, places_R=self.places_R[::step], begins_R=self.begins_R[::step])


def asked(number: int, row: Row, target: TargetWeights) -> Asked | None:
    """Return the row with the target's predictions, or None if a server would never draft in it."""
    mask_T = row.loss_mask.bool()
    places_R = torch.nonzero(mask_T[1:]).flatten()
    if not len(places_R):
        return None
    row = replace(row, read=lru_cache(row.read))  # every change reads layers
    begins_R = ~mask_T[places_R] | (places_R == 0)
    return Asked(number, row, target.likeliest(row), places_R, begins_R)


def spread(length: int, most: int) -> list[int]:
    """Return at most `most` of the numbers below `length`, evenly spaced over all of them."""
    count = min(length, most)
    return [place * length // count for place in range(count)]


def fed(setting: Setting, row: Row, other: Row) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the token ids [T] and states [T, F] of a row as fed by a setting."""
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
