"""Holds what a drafter was fed in serving to the training view of the stored row: place by place.

Legend: R rows, X width of a state.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from service.reader import View
from service.reader.row import Row
from tests.serving.fed import Fed
from tests.support.engine_bench import relative_T

TOLERANCE = 2e-5
"""Largest relative error of a token's state in float32: two engines batch differently, so they round so."""


@dataclass(slots=True)
class Parity:
    """Over some prompts: how many rows were compared, and where ids, positions and states differ."""

    rows: int = 0
    worst: float = 0.0
    """Largest relative error of a row's state."""
    wrong_ids: set[tuple[int, int]] = field(default_factory=set)
    """Prompt and row."""
    wrong_positions: set[tuple[int, int]] = field(default_factory=set)
    wrong_states: set[tuple[int, int]] = field(default_factory=set)
    state_size: int = 0

    def __str__(self) -> str:
        return (
            f"{self.rows} rows of {self.state_size}: {len(self.wrong_ids)} ids, "
            f"{len(self.wrong_positions)} positions, {len(self.wrong_states)} states differ; "
            f"worst relative error of a state {self.worst:.1e}"
        )


def held(fed: Mapping[int, Fed], rows: Mapping[int, Row], view: View) -> Parity:
    """Compare the first draft step of every prompt with a view of its row.

    Serving knows one token more than a prompt: the one that was just sampled. The view has it where the
    stored row goes on with the answer, and these do.
    """
    found = Parity()
    for prompt, one in fed.items():
        made = view(rows[prompt])
        ids_R, positions_R = (_first(made[name]) for name in ("input_ids", "positions"))
        states_RX = made["hidden_states"]
        num_rows = min(len(one.positions_R), len(positions_R))
        assert num_rows >= rows[prompt].prompt_tokens, "every position of the prompt is compared"
        found.rows += num_rows
        found.state_size = states_RX.shape[1]
        fed_positions_R = torch.tensor(one.positions_R)
        if one.ids_R:
            found.wrong_ids |= _where(prompt, torch.tensor(one.ids_R), ids_R, num_rows)
        found.wrong_positions |= _where(prompt, fed_positions_R, positions_R, num_rows)
        error_R = relative_T(states_RX[:num_rows].float(), one.states_RX[:num_rows].float())
        found.worst = max(found.worst, float(error_R.max()))
        off = (~(error_R <= TOLERANCE)).nonzero().flatten().tolist()
        found.wrong_states |= {(prompt, row) for row in off}
    return found


def _first(of_steps: torch.Tensor) -> torch.Tensor:
    """Return the first step's: [R], of [R] or [K, R]."""
    return of_steps[0] if of_steps.ndim > 1 else of_steps


def _where(prompt: int, fed_R: torch.Tensor, view_R: torch.Tensor, num_rows: int) -> set[tuple[int, int]]:
    off = (fed_R[:num_rows] != view_R[:num_rows]).nonzero().flatten().tolist()
    return {(prompt, row) for row in off}
