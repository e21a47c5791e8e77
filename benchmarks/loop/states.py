"""How far the states of decode steps are from those of a prefill of the same tokens.

Legend: T tokens, H hidden size.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

from benchmarks.loop.datasets import STATES
from service.reader import QuarryDataset


@dataclass(frozen=True, slots=True)
class Difference:
    """The relative error of a token's state, |a - b| / |b|, over the tokens that were decoded."""

    median: float
    p99: float
    largest: float
    tokens: int


def relative_T(found_TH: torch.Tensor, right_TH: torch.Tensor) -> torch.Tensor:
    """Return the relative error [T] of every token, in float64."""
    right = right_TH.double()
    error_T: torch.Tensor = (found_TH.double() - right).norm(dim=-1) / right.norm(dim=-1)
    return error_T


def differences(decoded: Path, prefilled: Path) -> dict[int, Difference]:
    """Compare two datasets of the same rows layer by layer, where the row's tokens were generated.

    Raises ValueError: a row of one is not in the other.
    """
    ours, theirs = QuarryDataset(decoded), QuarryDataset(prefilled)
    by_source = {row.source_id: row for row in map(theirs.row, range(len(theirs)))}
    errors: dict[int, list[torch.Tensor]] = {k: [] for k in ours.about.layer_ids}
    for row in map(ours.row, range(len(ours))):
        other = by_source.get(row.source_id)
        if other is None or not torch.equal(row.input_ids, other.input_ids):
            raise ValueError(f"row {row.source_id} has other tokens in {prefilled}")
        for k, found in errors.items():
            said = slice(row.prompt_tokens, None)
            found.append(relative_T(row.layer(k)[said], other.layer(k)[said]))
    return {k: summed_up(torch.cat(found)) for k, found in errors.items()}


def summed_up(errors: torch.Tensor) -> Difference:
    """Return the figures of all tokens' errors."""
    return Difference(float(errors.median()), float(errors.quantile(0.99)), float(errors.max()), len(errors))


@dataclass(frozen=True, slots=True)
class FileDifference:
    """Two exports of the same rows: the largest relative error of a state, and rows equal bit by bit."""

    rows: int
    identical_rows: int
    largest: float


def of_exports(ours: Path, theirs: Path) -> FileDifference:
    """Compare the states of two folders in the speculators trainer's format.

    Raises ValueError: a row of one has other tokens in the other.
    """
    names = sorted(path.name for path in (ours / STATES).iterdir())
    identical, largest = 0, 0.0
    for name in names:
        found, right = load_file(ours / STATES / name), load_file(theirs / STATES / name)
        if not torch.equal(found["token_ids"], right["token_ids"]):
            raise ValueError(f"{name} holds other tokens in {theirs}")
        states = found["hidden_states"], right["hidden_states"]
        identical += torch.equal(*states)
        largest = max(largest, float(relative_T(*states).max()))
    return FileDifference(len(names), identical, largest)
