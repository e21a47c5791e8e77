"""Tries every change of what a drafter is fed, each with every target that it may have learnt.

Legend: K drafted tokens, R places, D draft vocabulary, V vocabulary.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from service.diagnose.acceptance import Reading, Scores, difference, mean, score
from service.diagnose.drafter import Drafter
from service.diagnose.rows import Asked, Head, covered, probabilities, read
from service.diagnose.setting import Change, Setting, changes
from service.errors import OptionRefused

SURE = 0.998
"""Of an interval: some fifty changes are tried."""
LEAST_SHARE = 0.002
"""Of what is accepted already: a cause adds at least so much."""
GREEDY_SLACK = 0.01
"""Tokens that a cause may cost a greedy target: its mean varies more than that of one that samples."""
ROUNDS = 3
"""Changes on top of each other."""
QUICK_ROWS, HOPELESS = 8, 0.05
"""A change that loses this share over the first rows is tried on no more."""
_SAME = 1e-5
"""Largest difference of logits, in units of their largest, that is rounding."""

Effect = Literal["better", "worse", "no difference", "cannot alter it"]
DECLARED = "the target's distribution"
AS_IT_IS = Change("as it is fed", "", probe=True)

Target = Callable[[Asked, Asked, torch.Tensor], torch.Tensor]
"""From a row, another one, and places of tokens to the probabilities [R, V] of what may have been learnt."""

Said = tuple[torch.Tensor, torch.Tensor]
"""What a target says of each drafted token: probabilities [K, R, V], and the likeliest [K, R]."""


@dataclass(frozen=True, slots=True)
class Tried:
    """A change of the round's base.

    `length` is the greedy accepted length at every place. `sampled` and `gain` with its interval are of the
    tokens that a target that samples accepts at each place, which vary less.
    """

    round: int
    name: str
    cure: str
    length: float
    sampled: float
    gain: float
    low: float
    high: float
    effect: Effect
    probe: bool = False


@dataclass(slots=True)
class Search:
    """What was tried, and the changes and the target that the drafter does best with."""

    setting: Setting
    target: str = DECLARED
    tried: list[Tried] = field(default_factory=list)
    learnt: list[Tried] = field(default_factory=list)
    causes: list[Tried] = field(default_factory=list)
    missing_layers: set[int] = field(default_factory=set)


@dataclass(slots=True)
class _Measured:
    """Of one change, row by row and by each target: accepted greedily, and when it samples."""

    greedy: dict[str, Scores] = field(default_factory=dict)
    sampled: dict[str, Scores] = field(default_factory=dict)
    altered: float = 0.0

    @property
    def rows(self) -> int:
        return len(self.greedy[DECLARED])

    def add(
        self, reading: Reading, said: Mapping[str, Said], logits_KRD: torch.Tensor, map_D: torch.Tensor
    ) -> None:
        drafted_KR = map_D[logits_KRD.argmax(-1)]
        for name, (said_KRV, top_KR) in said.items():
            right_KR, covered_KR = drafted_KR == top_KR, covered(said_KRV, logits_KRD, map_D)
            self.greedy.setdefault(name, []).append(score(right_KR.numpy(), reading.known_KR))
            self.sampled.setdefault(name, []).append(score(covered_KR.numpy(), reading.known_KR))

    def best(self, rows: int | None = None) -> float:
        return max(mean(scores[:rows]) for scores in self.sampled.values())


def search(
    drafter: Drafter,
    rows: Sequence[Asked],
    targets: Mapping[str, Target],
    layer_ids: Sequence[int],
    num_layers: int,
) -> Search:
    """Try the changes over `rows`, and again on top of the best one as long as one is significantly better.

    A drafter that learnt another target takes other inputs better only by that target, so that each change is
    held against every target.
    """
    result = Search(drafter.declared)
    for number in range(ROUNDS):
        candidates = [AS_IT_IS]
        for change in changes(result.setting, drafter.config, drafter.key, num_layers):
            missing = set(change.of(result.setting).layers) - set(layer_ids)
            result.missing_layers |= missing
            candidates += [] if missing else [change]
        measured = _measured(drafter, rows, targets, result.setting, candidates)
        base = measured[AS_IT_IS]
        fed = {change: one for change, one in measured.items() if change is AS_IT_IS or not change.probe}
        whole = [one for one in fed.values() if one.rows == len(rows)]
        best_by = {name: max(mean(one.sampled[name]) for one in whole) for name in targets}
        target = max(best_by, key=best_by.__getitem__)
        if not _matches(base, target, result.target):
            target = result.target
        tried = {change: _tried(number, change, one, base, target) for change, one in measured.items()}
        result.tried += tried.values()
        least = 1 + mean(base.greedy[target]) - GREEDY_SLACK
        better = [
            change
            for change, one in tried.items()
            if one.effect == "better" and one.length > least and not change.probe
        ]
        if better:
            best = max(better, key=lambda change: tried[change].gain)
            result.causes.append(tried[best])
            result.setting, base = best.of(result.setting), measured[best]
        result.target = target
        result.learnt = [_learnt(name, base) for name in targets if name != DECLARED]
        if not better:
            break
    return result


def _matches(own: _Measured, target: str, than: str) -> bool:
    """Say whether it covers more of a target than of another, and says its likeliest token more often.

    A drafter that knows little covers most of what is flattest.
    """
    return _gain(own, own, target, than) is not None and mean(own.greedy[target]) > mean(own.greedy[than])


def _measured(
    drafter: Drafter,
    rows: Sequence[Asked],
    targets: Mapping[str, Target],
    base: Setting,
    candidates: Sequence[Change],
) -> dict[Change, _Measured]:
    measured = {change: _Measured() for change in candidates}
    for at, one in enumerate(rows):
        other = rows[at - 1]
        of_KR = [one.places_R + 1 + step for step in range(drafter.steps)]
        said: dict[str, Said] = {}
        for name, target in targets.items():
            said_KRV = torch.stack([target(one, other, of_R) for of_R in of_KR])
            said[name] = (said_KRV, said_KRV.argmax(-1))
        base_KRD = None
        least = (1 - HOPELESS) * measured[AS_IT_IS].best(QUICK_ROWS) if at >= QUICK_ROWS else 0.0
        for change, scores in list(measured.items()):
            if at >= QUICK_ROWS and scores.best(QUICK_ROWS) < least:
                continue
            setting = change.of(base)
            try:
                logits_KRD, reading = read(drafter, setting, one, other)
            except OptionRefused:  # such a config makes no model of these tensors
                del measured[change]
                continue
            map_D = drafter.targets(setting.map)
            scores.add(reading, said, logits_KRD, map_D)
            base_KRD = logits_KRD if base_KRD is None else base_KRD
            distance = float((logits_KRD - base_KRD).abs().max()) / (float(base_KRD.abs().max()) or 1.0)
            scores.altered = max(scores.altered, distance, float(setting.map != base.map))
    return measured


def _gain(
    ours: _Measured, base: _Measured, target: str, base_target: str
) -> tuple[float, float, float] | None:
    """Return by how much more is accepted, with the interval; null if that is not significant."""
    rows = len(ours.sampled[target])
    gain = difference(ours.sampled[target], base.sampled[base_target][:rows], SURE)
    enough = gain[0] >= LEAST_SHARE * mean(base.sampled[base_target])
    return gain if gain[1] > 0 and enough else None


def _tried(number: int, change: Change, own: _Measured, base: _Measured, target: str) -> Tried:
    rows = own.rows
    gain, low, high = difference(own.sampled[target], base.sampled[target][:rows], SURE)
    effect: Effect = "worse" if high < 0 else "no difference"
    if own.altered < _SAME:
        effect = "no difference" if change is AS_IT_IS else "cannot alter it"
    elif _gain(own, base, target, target):
        effect = "better"
    length, sampled = 1 + mean(own.greedy[target]), mean(own.sampled[target])
    return Tried(number, change.name, change.cure, length, sampled, gain, low, high, effect, change.probe)


def _learnt(name: str, own: _Measured) -> Tried:
    gain, low, high = difference(own.sampled[name], own.sampled[DECLARED], SURE)
    effect: Effect = "worse" if high < 0 else "no difference"
    if _matches(own, name, DECLARED):
        effect = "better"
    sampled = mean(own.sampled[name])
    return Tried(0, name, TARGET_CURES[name], 1 + mean(own.greedy[name]), sampled, gain, low, high, effect)


TARGET_CURES = {
    "the final norm applied twice": "the trainer applies the final norm itself: store the last layer before "
    "it, or tell the trainer that it is normed (hidden_states_prenorm: false)",
    "no final norm": "the trainer applies no final norm: store the last layer after it, or give it the norm",
    "the layer below the last": "take the last layer by vLLM's id N, the number of decoder layers, not N - 1",
    "one token earlier": "the trainer's target must be token t + 2 where it feeds token t + 1",
    "one token later": "the trainer's target must be token t + 2 where it feeds token t + 1",
    "the embeddings as head": "give the trainer the target's lm_head.weight",
    "another row's": "states and tokens of the training data were of different rows: make it anew",
}


def targets(num_layers: int, head: Head, embeddings: Head, layer_ids: Sequence[int]) -> dict[str, Target]:
    """Return the distributions that a drafter may have learnt, by name."""

    def last(by: int = 0, weights: Head = head, norms: int = 1) -> Target:
        def target(one: Asked, _other: Asked, of_R: torch.Tensor) -> torch.Tensor:
            def norm(states_TH: torch.Tensor) -> torch.Tensor:
                for _ in range(norms):
                    states_TH = one.row.normed(states_TH)
                return states_TH

            return probabilities(one.last_TH, of_R + by, norm, weights)

        return target

    by_name = {
        DECLARED: last(),
        "the final norm applied twice": last(norms=2),
        "no final norm": last(norms=0),
        "one token earlier": last(-1),
        "one token later": last(1),
        "the embeddings as head": last(weights=embeddings),
        "another row's": lambda _one, other, of_R: probabilities(
            other.last_TH, of_R % len(other.last_TH), other.row.normed, head
        ),
    }
    if num_layers - 1 in layer_ids:
        by_name["the layer below the last"] = lambda one, _other, of_R: probabilities(
            one.row.layer(num_layers - 1), of_R, one.row.normed, head
        )
    return by_name
