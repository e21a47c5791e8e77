"""A small target for tests, with random weights, in seconds."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from examples.tiny_target import Recipe, make_model, make_tokenizer, save

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NORM_SPREAD = 0.3
WEIGHT_STD = 0.08


def random_target(folder: Path, **recipe: Any) -> Path:
    """Make an untrained target in `folder` and return it; the keywords are `Recipe`'s.

    Weights are wide enough that every layer moves the residual stream, and norm weights differ from 1, so
    that a missing norm, a wrong layer or another sample's row shows in any comparison.
    """
    told = Recipe(**recipe)
    tokenizer = make_tokenizer(told)
    model = make_model(told, tokenizer)
    _roughen(model, told.seed)
    save(model, tokenizer, told, folder)
    return folder


def _roughen(model: "PreTrainedModel", seed: int) -> None:
    """Redraw every weight: vectors around 1, matrices around 0."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(1 + NORM_SPREAD * noise if weight.ndim == 1 else WEIGHT_STD * noise)
