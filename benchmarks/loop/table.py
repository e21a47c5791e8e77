"""Side by side: what each dataset's drafter got accepted. Pure."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from benchmarks.harness import markdown
from benchmarks.loop.serve import Acceptance
from benchmarks.loop.states import Difference

OURS = "quarry"
PEER = "speculators"
FP8 = "quarry_fp8"
IN_PLACE, LIVE = "in_place", "live"
UNTRAINED = "untrained"
ROWS = {
    OURS: "Quarry: the states of the decode steps",
    PEER: "speculators' own dump: a prefill of the same tokens",
    FP8: "Quarry with `fp8`: the same answers, stored lossily",
    IN_PLACE: "the same, read in place by `quarry train speculators`",
    LIVE: "the same rows captured anew for each epoch, trained on live over a tenth of the disk",
    "layer_below": "wrong: every layer is k - 1",
    "extra_norm": "wrong: last layer already normed",
    "other_row": "wrong: states of another row",
    UNTRAINED: "no training",
}
IN_CONVERSATIONS = {
    "source": "conversations with the answers of their source",
    "last_turn": "the same, the last turn answered by the target",
    "all_turns": "the same, every turn answered by the target",
}
WRONG = ("layer_below", "extra_norm", "other_row")
FEWER = (OURS, PEER, "layer_below")
"""What a second method is trained on: enough for it to fail."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One dataset: the steps of its drafters, seed by seed, and their acceptance.

    The trainer packs batches in an order that is the seed's, so that seeds may differ by a step.
    """

    steps: tuple[int, ...]
    by_seed: dict[int, Acceptance]

    @property
    def mean_length(self) -> float:
        """The mean of the seeds' mean accepted lengths."""
        return fmean(one.mean_length for one in self.by_seed.values())

    @property
    def lengths(self) -> list[float]:
        """The mean accepted length of every seed, ascending."""
        return sorted(one.mean_length for one in self.by_seed.values())

    @property
    def rates(self) -> list[float]:
        """The share of drafts whose token at each position was accepted, over all seeds."""
        drafts = sum(one.drafts for one in self.by_seed.values())
        places = zip(*(one.per_position for one in self.by_seed.values()), strict=True)
        return [sum(counts) / drafts for counts in places]

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON."""
        return {
            "mean_accepted_length": round(self.mean_length, 4),
            "acceptance_by_position": [round(rate, 4) for rate in self.rates],
            "steps": list(self.steps),
            "seeds": {
                seed: {"mean_accepted_length": round(one.mean_length, 4), **asdict(one)}
                for seed, one in self.by_seed.items()
            },
        }


def acceptance_table(title: str, outcomes: Mapping[str, Outcome]) -> str:
    """Return the table of mean accepted lengths of a method's drafters."""
    depth = len(next(iter(outcomes.values())).rates)
    headers = [f"{title} trained on", "steps", "mean accepted length", "least and most of a seed"]
    headers += [f"accepted at {place + 1}" for place in range(depth)]
    rows = [
        [
            (ROWS | IN_CONVERSATIONS)[name],
            "..".join(map(str, sorted({min(outcome.steps), max(outcome.steps)}))),
            f"{outcome.mean_length:.3f}",
            f"{outcome.lengths[0]:.3f}..{outcome.lengths[-1]:.3f}",
            *(f"{rate:.3f}" for rate in outcome.rates),
        ]
        for name, outcome in outcomes.items()
    ]
    return markdown(headers, rows)


def judged(title: str, outcomes: Mapping[str, Outcome], slack: float) -> list[str]:
    """Return what is not as it should be, empty if all is.

    Our drafters come within `slack` of the peer's mean accepted length or above it; those of the states that
    were stored in fp8, read in place or live within `slack` of ours. Every wrong dataset's stay below ours by
    more than that, and the untrained one is far below.
    """
    ours, peer = outcomes[OURS].mean_length, outcomes[PEER].mean_length
    wrong = [f"{title}, {OURS}: {ours:.3f} is below the peer's {peer:.3f}"] if ours < peer - slack else []
    if FP8 in outcomes and (lossy := outcomes[FP8].mean_length) < ours - slack:
        wrong.append(f"{title}, {FP8}: {lossy:.3f} is below ours without loss, {ours:.3f}")
    wrong += [
        f"{title}, {name}: {outcomes[name].mean_length:.3f} is below that of the export, {ours:.3f}"
        for name in (IN_PLACE, LIVE)
        if name in outcomes and outcomes[name].mean_length < ours - slack
    ]
    wrong += [
        f"{title}, {name}: {outcome.mean_length:.3f} is not visibly below ours, {ours:.3f}"
        for name, outcome in outcomes.items()
        if name not in (OURS, PEER, FP8, IN_PLACE, LIVE) and outcome.mean_length >= ours - slack
    ]
    return wrong


def report(by_title: Mapping[str, Mapping[str, Outcome]], beside: Difference) -> str:
    """Return the printed report."""
    line = (
        f"Our states and the peer's: {beside.identical_rows} of {beside.rows} rows are equal bit by bit; "
        f"largest relative error of a state {beside.largest:.1e}"
    )
    tables = [acceptance_table(title, outcomes) for title, outcomes in by_title.items()]
    return "\n\n".join([*tables, line])
