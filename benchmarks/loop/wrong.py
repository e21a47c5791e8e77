"""Datasets that are wrong in the ways that trouble the field, made of right ones. Trainers load them all."""

import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from benchmarks.loop.recipe import AUX, LAST
from benchmarks.loop.stage import Cache
from benchmarks.loop.states import STATES
from service.reader import QuarryDataset

DATA = "data"
Mistake = Callable[[torch.Tensor, int], torch.Tensor]
"""From the right states [T, A + 1, H] and the row's number to the wrong ones."""


def layer_below(dataset: Path) -> Mistake:
    """Every layer, the last one too, is the one below the one that was meant: ids counted from 0."""
    rows = QuarryDataset(dataset)

    def wrong(right: torch.Tensor, number: int) -> torch.Tensor:
        row = rows.row(number)
        return torch.stack([row.layer(k - 1) for k in (*AUX, LAST)], dim=1)

    return wrong


def extra_norm(dataset: Path) -> Mistake:
    """The last layer is stored after the final norm, and the trainer applies the norm again."""
    rows = QuarryDataset(dataset)

    def wrong(right: torch.Tensor, number: int) -> torch.Tensor:
        return torch.cat([right[:, :-1], rows.row(number).last_normed()[:, None]], dim=1)

    return wrong


def other_row(dataset: Path) -> Mistake:
    """The states are of the next request of the batch, as long as it lasts, then over again."""
    rows = QuarryDataset(dataset)

    def wrong(right: torch.Tensor, number: int) -> torch.Tensor:
        other = rows.row((number + 1) % len(rows))
        states = torch.stack([other.layer(k) for k in (*AUX, LAST)], dim=1)
        return states[torch.arange(len(right)) % len(states)]

    return wrong


MISTAKES = {"layer_below": layer_below, "extra_norm": extra_norm, "other_row": other_row}


def spoiled(cache: Cache, mistake: str, dataset: Path, export: Path) -> Path:
    """Return `export`, which is of `dataset`, with one mistake in the states of every row."""

    def make(folder: Path) -> None:
        shutil.copytree(export, folder / DATA, ignore=shutil.ignore_patterns(STATES))
        wrong = MISTAKES[mistake](dataset)
        (folder / DATA / STATES).mkdir()
        for number in range(len(QuarryDataset(dataset))):
            name = f"hs_{number}.safetensors"
            tensors = load_file(export / STATES / name)
            tensors["hidden_states"] = wrong(tensors["hidden_states"], number).contiguous()
            save_file(tensors, folder / DATA / STATES / name)

    return cache.stage(f"{mistake}", {"export": export.parent.name}, make) / DATA
