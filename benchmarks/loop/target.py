"""The loop's target: the demo's, with a final norm as uneven as a large model's.

The weights of a small model's final norm stay near one, so that a norm too many would change next to nothing,
while those of large models differ by an order of magnitude. Each weight is multiplied by a factor and the
head's column of that channel divided by it: the target computes what it did, and its norm is uneven.
"""

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from benchmarks.loop.recipe import LoopRecipe
from benchmarks.loop.stage import Cache
from examples.tiny_target import cached_target

WEIGHTS = "model.safetensors"
NORM, HEAD = "model.norm.weight", "lm_head.weight"
SPREAD = 1.0
"""Standard deviation of the factors' logarithm."""


def make_target(cache: Cache, recipe: LoopRecipe) -> Path:
    """Return the target's folder."""
    made = cached_target(recipe.target)

    def make(folder: Path) -> None:
        shutil.copytree(made, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns(WEIGHTS))
        tensors = unevenly_normed(load_file(made / WEIGHTS), recipe.target.seed)
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})

    return cache.stage("target", {"made": made.name, "spread": SPREAD}, make)


def unevenly_normed(tensors: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """Return the weights of a model that computes the same, with another final norm and head."""
    draw = torch.Generator().manual_seed(seed)
    factors_H = torch.exp(SPREAD * torch.randn(len(tensors[NORM]), generator=draw))
    return tensors | {NORM: tensors[NORM] * factors_H, HEAD: tensors[HEAD] / factors_H}
