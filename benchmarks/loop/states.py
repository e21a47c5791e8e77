"""How far our states are from the peer's of the same rows.

Legend: T tokens, A auxiliary layers, H hidden size.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

from benchmarks.loop.datasets import STATES


@dataclass(frozen=True, slots=True)
class Difference:
    """Two exports of the same rows: the largest relative error of a state, and rows equal bit by bit."""

    rows: int
    identical_rows: int
    largest: float


def difference(ours: Path, theirs: Path) -> Difference:
    """Compare the states of two folders in the speculators trainer's format.

    Raises ValueError: a row of one has other tokens in the other.
    """
    names = sorted(path.name for path in (ours / STATES).iterdir())
    identical, largest = 0, 0.0
    for name in names:
        row, reference = load_file(ours / STATES / name), load_file(theirs / STATES / name)
        if not torch.equal(row["token_ids"], reference["token_ids"]):
            raise ValueError(f"{name} holds other tokens in {theirs}")
        states = row["hidden_states"], reference["hidden_states"]
        identical += torch.equal(*states)
        largest = max(largest, float(relative_errors(*states).max()))
    return Difference(len(names), identical, largest)


def relative_errors(states: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Return |a - b| / |b| of every state over its last axis, in float64."""
    expected = reference.double()
    errors: torch.Tensor = (states.double() - expected).norm(dim=-1) / expected.norm(dim=-1)
    return errors
