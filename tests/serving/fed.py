"""A recording, sorted by request: what one prompt's drafter was fed, position after position.

Legend: R rows, one for each token that the target has kept; X width of the states that the runner hands
over; H hidden size of the drafter; B requests of a batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Later:
    """What a drafter is fed behind `row`, which is fed token row + 1.

    If it drafts one by one, that is its own draft and its own state at draft step `step`; else it is what
    stands in the slots of the first pass that hold no token yet.
    """

    row: int
    step: int
    input_id: int
    position: int
    state_H: torch.Tensor | None
    layer: int | None = None
    """Which of the drafter's layers runs, where the proposer says so."""


@dataclass(slots=True)
class Fed:
    """One request. Rows whose token the target rejected are left out, as the proposer leaves them out.

    `ids_R` and `positions_R` are those of the drafter's forward. DFlash's is given no row of the context:
    `ids_R` is empty, and `anchors` says what its queries begin with.
    """

    ids_R: list[int] = field(default_factory=list)
    positions_R: list[int] = field(default_factory=list)
    target_states: list[torch.Tensor] = field(default_factory=list)
    drafter_states: list[torch.Tensor] = field(default_factory=list)
    chunk_ends: list[int] = field(default_factory=list)
    """Last rows of chunks behind which the prompt goes on: what is drafted there is thrown away."""
    later: list[Later] = field(default_factory=list)
    anchors: dict[int, tuple[int, int]] = field(default_factory=dict)
    """DFlash: by the context's last row, id and position of the first query."""
    drafts: int = 0
    """Passes whose drafts the target was given to verify."""

    def accepted(self, prompt_tokens: int) -> int:
        """Return how many drafts the target kept: each pass behind the prompt adds one row without them."""
        return len(self.positions_R) - prompt_tokens - (self.drafts - 1)

    @property
    def states_RX(self) -> torch.Tensor:
        """What the runner handed over: the target's states, side by side where there are several."""
        return torch.cat(self.target_states)

    @property
    def states_RH(self) -> torch.Tensor:
        """What the drafter itself was given."""
        return torch.cat(self.drafter_states)


def by_request(passes: Sequence[dict[str, Any]]) -> dict[int, Fed]:
    """Return what each prompt's drafter was fed, by the prompt's place in the order."""
    found: dict[int, Fed] = {}
    for one in passes:
        for place, name in enumerate(one["requests"]):
            fed = found.setdefault(int(name.split("-")[0]), Fed())
            _add(fed, one, place)
    return found


def _add(fed: Fed, one: dict[str, Any], place: int) -> None:
    begin, end = (int(start) for start in one["target_starts"][place : place + 2])
    end -= int(one["rejected"][place])
    fed.target_states.append(one["target_states"][begin:end])
    first, *drafted = one["calls"]
    own = int(one["starts"][place])
    slots = len(one["samples"]) // len(one["requests"])
    samples = one["samples"][place * slots : (place + 1) * slots].tolist()
    if "context" in one:
        fed.positions_R += one["context"]["positions"][begin:end].tolist()
        fed.drafter_states.append(one["context"]["states"][begin:end])
        row = fed.positions_R[-1]
        fed.anchors[row] = (int(first["input_ids"][own]), int(first["positions"][own]))
        masked = samples
    else:
        rows = slice(own, own + end - begin)
        fed.ids_R += first["input_ids"][rows].tolist()
        fed.positions_R += first["positions"][rows].tolist()
        fed.drafter_states.append(first["hidden_states"][rows])
        row = fed.positions_R[-1]
        assert samples[0] == rows.stop - 1, "the rows that count end where the drafter drafts"
        masked = samples[1:]
    states = first.get("hidden_states")
    for step, slot in enumerate(masked, 1):
        state_H = None if states is None else states[slot]
        fed.later.append(
            Later(row, step, int(first["input_ids"][slot]), int(first["positions"][slot]), state_H)
        )
    for step, call in enumerate(drafted, 1):
        assert len(call["input_ids"]) == len(one["requests"]), "later steps run on a row for each request"
        fed.later.append(
            Later(
                row,
                step,
                int(call["input_ids"][place]),
                int(call["positions"][place]),
                call["hidden_states"][place],
                call.get("spec_step_idx"),
            )
        )
    if one["partial"][place]:
        fed.chunk_ends.append(row)
    else:
        fed.drafts += 1
