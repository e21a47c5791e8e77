"""Tries every change of a drafter's inputs, each with every objective that it may have been trained for.

Legend: K drafted tokens, R places, D draft vocabulary, V vocabulary, N rows, O objectives.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch

from service.diagnose.acceptance import Counts, Floats, bootstrap
from service.diagnose.drafter import Drafter
from service.diagnose.rows import Asked, fed
from service.diagnose.setting import Change, Setting, changes
from service.diagnose.target import Objective
from service.errors import OptionRefused

SURE = 0.998
"""Confidence of the intervals: some fifty changes are tried."""
LEAST_SHARE = 0.01
"""Share of the accepted tokens that a cause must add at least; less explains nothing, and is no loss."""
GREEDY_SLACK = 0.01
"""Accepted tokens that a cause may cost with a greedy target, whose mean is noisier than that of a sampling
one.
"""
ROUNDS = 3
"""How many changes may be combined."""
QUICK_ROWS, HOPELESS, MOST_KEPT = 8, 0.05, 20
"""After the first rows, changes that lose more than this share are dropped; of the rest, the probes and the
best ones are kept, up to a maximum.
"""
_SAME = 1e-6
"""Relative difference of accepted tokens that counts as rounding."""
_GREEDY, _CHANCE, _SAMPLED = range(3)

Effect = Literal["better", "worse", "no difference", "cannot alter it"]
AS_IT_IS = Change("as it is fed", "", probe=True)


@dataclass(frozen=True, slots=True)
class Tried:
    """A change of the round's base setting, and its effect.

    Lengths are of drafts at every place: `length` with a greedy target, `chance` with a sampling target and
    greedy drafts, `sampled` with a sampling target and sampled drafts. `gain` and its interval are of
    `sampled`, which is the least noisy.
    """

    name: str
    cure: str
    length: float
    chance: float
    sampled: float
    gain: float
    low: float
    high: float
    effect: Effect


@dataclass(slots=True)
class Search:
    """What was tried, by round, which changes were causes, and what was learnt with all causes applied."""

    tried: list[Tried] = field(default_factory=list)
    learnt: list[Tried] = field(default_factory=list)
    causes: list[Tried] = field(default_factory=list)
    missing_layers: list[int] = field(default_factory=list)


def search(
    drafter: Drafter,
    rows: Sequence[Asked],
    objectives: Sequence[Objective],
    layer_ids: Sequence[int],
    *,
    changed: bool,
) -> Search:
    """Try the changes over `rows`, then again on top of the best one, as long as one is significantly better.

    With `changed` false, the drafter is only measured as it is fed.

    If a drafter was trained for another objective, better inputs show only with that objective.
    """
    result, setting, missing = Search(), drafter.declared, set[int]()
    counts_N = np.array([len(one.places_R) for one in rows])
    for _ in range(ROUNDS):
        candidates = [AS_IT_IS]
        for change in changes(setting, drafter.config, drafter.target.num_layers) if changed else ():
            lacking = set(change.of(setting).layers) - set(layer_ids)
            missing |= lacking
            candidates += [] if lacking else [change]
        measured = _measured(drafter, rows, objectives, setting, candidates)
        result.learnt = _learnt(objectives, measured[AS_IT_IS], counts_N)
        inputs = [sums for change, sums in measured.items() if change is AS_IT_IS or not change.probe]
        by = int(np.max([sums.sum(axis=0)[:, _SAMPLED] for sums in inputs], axis=0).argmax())
        if by and result.learnt[by - 1].effect != "better":
            by = 0
        base_N3, better = measured[AS_IT_IS][:, by], dict[Change, Tried]()
        for change, sums_NO3 in measured.items():
            tried = _compared(change, sums_NO3[:, by], base_N3, counts_N, GREEDY_SLACK)
            result.tried.append(tried)
            if tried.effect == "better" and not change.probe:
                better[change] = tried
        if not better:
            break
        cause = max(better, key=lambda change: better[change].gain)
        result.causes.append(better[cause])
        setting = cause.of(setting)
        result.learnt = _learnt(objectives, measured[cause], counts_N)
    result.missing_layers = sorted(missing)
    return result


def _learnt(objectives: Sequence[Objective], sums_NO3: Floats, counts_N: Counts) -> list[Tried]:
    """Compare how the drafter fits each other objective with the right one.

    A drafter that knows little fits flat distributions best, so a greedy target must also accept more.
    """
    return [
        _compared(Change(one.name, one.cure), sums_NO3[:, place], sums_NO3[:, 0], counts_N)
        for place, one in enumerate(objectives)
        if place
    ]


def _compared(
    change: Change, ours_N3: Floats, base_N3: Floats, counts_N: Counts, slack: float = 0.0
) -> Tried:
    """Return the effect of a change, over the rows on which it was tried."""
    before = base_N3.sum(axis=0) / counts_N.sum()
    base_N3, counts_N = base_N3[: len(ours_N3)], counts_N[: len(ours_N3)]
    length, chance, sampled = (ours_N3.sum(axis=0) / counts_N.sum()).tolist()
    gain, low, high = bootstrap((ours_N3 - base_N3)[:, _SAMPLED], counts_N, SURE)
    least = LEAST_SHARE * before[_SAMPLED]
    effect: Effect = "worse" if high < 0 and gain <= -least else "no difference"
    if change is not AS_IT_IS and np.allclose(ours_N3[:, _SAMPLED], base_N3[:, _SAMPLED], rtol=_SAME):
        effect = "cannot alter it"
    elif low > 0 and gain >= least and length > before[_GREEDY] - slack:
        effect = "better"
    return Tried(change.name, change.cure, 1 + length, 1 + chance, 1 + sampled, gain, low, high, effect)


def _measured(
    drafter: Drafter,
    rows: Sequence[Asked],
    objectives: Sequence[Objective],
    base: Setting,
    candidates: Sequence[Change],
) -> dict[Change, Floats]:
    """Return the accepted tokens over all places of each row, by change and objective: [N, O, 3]."""
    sums: dict[Change, list[Floats]] = {change: [] for change in candidates}
    running = list(candidates)
    for at, one in enumerate(rows):
        row, other = one.row, rows[at - 1].row
        of_KR, known_KR = one.drafted_at(drafter.steps)
        said = [each.probabilities(drafter.target, row, other, of_KR) for each in objectives]
        for change in list(running):
            setting = change.of(base)
            try:
                logits_KRD = drafter.logits(*fed(setting, row, other), one.places_R, setting)
            except OptionRefused:  # no model can be built from this config and these tensors
                running.remove(change)
                continue
            sums[change].append(_accepted(said, logits_KRD, drafter.targets(setting.map), known_KR))
        if at + 1 == QUICK_ROWS:
            most = {change: np.sum(sums[change], axis=0)[:, _SAMPLED].max() for change in running}
            least = (1 - HOPELESS) * most[AS_IT_IS]
            hopeful = [change for change in running if most[change] >= least]
            running = sorted(hopeful, key=lambda change: (not change.probe, -most[change]))[:MOST_KEPT]
    return {change: np.array(parts) for change, parts in sums.items() if parts}


def _accepted(
    said: Sequence[torch.Tensor], logits_KRD: torch.Tensor, map_D: torch.Tensor, known_KR: torch.Tensor
) -> Floats:
    """Return the tokens accepted over all places, [O, 3], for target probabilities `said`, [K, R, V] each."""
    drafted_KR1, drawn_KRD = logits_KRD.argmax(-1, keepdim=True), logits_KRD.softmax(-1)
    sums = []
    for said_KRV in said:
        chance_KR1 = said_KRV.gather(-1, map_D[drafted_KR1])
        right_KR = (chance_KR1 == said_KRV.amax(-1, keepdim=True))[..., 0]
        covered_KR = torch.minimum(said_KRV[..., map_D], drawn_KRD).sum(-1)
        kinds_3KR = torch.stack([right_KR, chance_KR1[..., 0], covered_KR]).double() * known_KR
        sums.append(kinds_3KR.cumprod(1).sum((1, 2)))
    accepted: Floats = torch.stack(sums).numpy()
    return accepted
