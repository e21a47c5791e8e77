"""Rows of the dataset as a drafter is asked about them, and what the target itself says at each token.

Legend: T tokens, F fed features, K drafted tokens, R places, D draft vocabulary, V vocabulary, H hidden size.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from service.diagnose.acceptance import Reading
from service.diagnose.drafter import Drafter
from service.diagnose.setting import Setting
from service.proof.head_weights import HeadWeights
from service.reader import Row

OWN_SHARE = 0.97
"""Of an answer's tokens: rounding alone makes another token the likeliest now and then."""
_PLACES = 256
"""Whose whole distributions are computed at once."""
Norm = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Asked:
    """One row. A server may draft at `places_R`: token t + 1 is supervised. `top_T`: what the target says."""

    number: int
    row: Row
    last_TH: torch.Tensor
    top_T: torch.Tensor
    places_R: torch.Tensor
    begins_R: torch.Tensor
    own_share: float

    @property
    def own(self) -> bool:
        """Say whether the answers are what the target says."""
        return self.own_share >= OWN_SHARE

    def thinned(self, places: int) -> "Asked":
        """Return the row with so many of its places at most, evenly spread."""
        step = -(-len(self.places_R) // places)
        return replace(self, places_R=self.places_R[::step], begins_R=self.begins_R[::step])


class Head:
    """The target's head over states that were normed: logits [T, V] in float32."""

    def __init__(self, weights: HeadWeights) -> None:
        self._weights = replace(weights, weight_VH=weights.weight_VH.float())

    def __call__(self, normed_TH: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        head = self._weights
        logits_TV = normed_TH.float() @ head.weight_VH.T
        if head.bias_V is not None:
            logits_TV += head.bias_V.float()
        if head.soft_cap:
            logits_TV = head.soft_cap * torch.tanh(logits_TV / head.soft_cap)
        return logits_TV * head.scale


def asked(number: int, row: Row, head: Head) -> Asked | None:
    """Return the row with what the target says of it; none if a server would never draft in it."""
    mask_T = row.loss_mask.bool()
    places_R = torch.nonzero(mask_T[1:]).flatten()
    if not len(places_R):
        return None
    row = replace(row, read=lru_cache(row.read))  # a layer is asked for by every change
    last_TH = row.last()
    top_T = torch.cat([head(row.normed(part)).argmax(-1) for part in torch.split(last_TH, _PLACES)])
    own = (top_T[places_R] == row.input_ids[places_R + 1]).float().mean()
    return Asked(number, row, last_TH, top_T, places_R, ~mask_T[places_R] | (places_R == 0), float(own))


def fed(setting: Setting, one: Asked, other: Asked) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids [T] and states [T, F] of a row as a setting feeds them."""
    num_tokens = one.row.num_tokens
    index_T = torch.arange(num_tokens)
    source = (other if setting.states == "other" else one).row
    read = {k: source.layer(k) for k in set(setting.layers)}
    normed = {k: source.normed(states) if setting.normed else states for k, states in read.items()}
    states_TF = torch.cat([normed[k] for k in setting.layers], dim=-1)
    states_TF = states_TF[(index_T + setting.states_by).clamp(0, num_tokens - 1) % len(states_TF)].float()
    if setting.dtype:
        states_TF = states_TF.to(getattr(torch, setting.dtype)).float()
    states_TF = states_TF * (0.0 if setting.states == "none" else setting.scale)
    ids_T = (other if setting.tokens == "other" else one).row.input_ids
    return ids_T[(index_T + setting.tokens_by).clamp(0, num_tokens - 1) % len(ids_T)], states_TF


def read(
    drafter: Drafter, setting: Setting, one: Asked, other: Asked, said_KRV: torch.Tensor | None = None
) -> tuple[torch.Tensor, Reading]:
    """Return the logits [K, R, D] of a row, and what a target accepts of them.

    Without what the target says (`said_at`), the likelihoods are left at zero.
    """
    ids_T, states_TF = fed(setting, one, other)
    logits_KRD = drafter.logits(ids_T, states_TF, one.places_R, setting)
    map_D, drafted_KR = drafter.targets(setting.map), logits_KRD.argmax(-1)
    of_KR = one.places_R + 1 + torch.arange(len(logits_KRD))[:, None]
    known_KR = of_KR < one.row.num_tokens
    right_KR = (map_D[drafted_KR] == one.top_T[of_KR.clamp(max=one.row.num_tokens - 1)]) & known_KR
    chance_KR = overlap_KR = torch.zeros(known_KR.shape)
    if said_KRV is not None:
        said_KRD = said_KRV[..., map_D]
        chance_KR = said_KRD.gather(-1, drafted_KR[..., None])[..., 0]
        overlap_KR = covered(said_KRV, logits_KRD, map_D)
    arrays = (right_KR.numpy(), known_KR.numpy(), chance_KR.double().numpy(), overlap_KR.double().numpy())
    return logits_KRD, Reading(one.number, one.places_R.numpy(), one.begins_R.numpy(), *arrays, own=one.own)


def said_at(one: Asked, num_steps: int, head: Head) -> torch.Tensor:
    """Return the target's probabilities [K, R, V] of the token that each draft is of."""
    return torch.stack(
        [
            probabilities(one.last_TH, one.places_R + 1 + step, one.row.normed, head)
            for step in range(num_steps)
        ]
    )


def covered(said_KRV: torch.Tensor, logits_KRD: torch.Tensor, map_D: torch.Tensor) -> torch.Tensor:
    """Return how much of the target's probabilities the drafter's cover: sum of min(p, q), [K, R]."""
    return torch.minimum(said_KRV[..., map_D], logits_KRD.softmax(-1)).sum(-1)


def probabilities(states_TH: torch.Tensor, of_R: torch.Tensor, norm: Norm, head: Head) -> torch.Tensor:
    """Return the probabilities [R, V] that a head gives the states at `of_R`, the last one beyond the end."""
    inside_R = of_R.clamp(max=len(states_TH) - 1)
    return torch.cat([head(norm(states_TH[part])).softmax(-1) for part in torch.split(inside_R, _PLACES)])
