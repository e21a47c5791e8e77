"""What Quarry takes a target's final norm for is what transformers' own module does, for every recipe.

With a norm that is guessed wrong, rows that are right are refused, or a head that is wrong passes.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from service.errors import EngineRefused
from service.proof.head import Head
from service.proof.head_weights import FINAL_NORM_MODULE, HeadWeights, NormWeights, norm_kind, text_config
from tests.architectures.recipe import HIDDEN_SIZE, Recipe
from tests.architectures.recipes import RECIPES
from tests.architectures.target import Unmakeable, make_config


def makeable(recipe: Recipe) -> bool:
    """Say whether transformers has the model; the matrix tells of those that it has not."""
    try:
        make_config(recipe)
    except Unmakeable:
        return False
    return not recipe.made_by


ONE_OF_EACH = {recipe.model_type: recipe for recipe in RECIPES.values() if makeable(recipe)}

REFUSED = {"nemotron"}
"""Norms that Quarry has no name for."""


def final_norm(recipe: Recipe) -> tuple[str, Any]:
    """Return the module of a model without weights, on the CPU with random ones."""
    config = make_config(recipe)
    with torch.device("meta"):
        model = getattr(transformers, recipe.loader).from_config(config)
    ((_, norm),) = [(name, part) for name, part in model.named_modules() if FINAL_NORM_MODULE.fullmatch(name)]
    norm = norm.to_empty(device="cpu").float()
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in norm.parameters():
            weight.copy_(1 + 0.3 * torch.randn(weight.shape, generator=draw))
    return config, norm


@pytest.mark.parametrize("model_type", ONE_OF_EACH)
def test_the_norm_is_the_models_own(model_type: str, tmp_path: Path):
    config, module = final_norm(ONE_OF_EACH[model_type])
    config.save_pretrained(tmp_path)
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    known = text_config(tmp_path)
    if model_type in REFUSED:
        with pytest.raises(EngineRefused, match=model_type):
            norm_kind(tmp_path, model_type, known, has_bias=bias is not None)
        return
    kind = norm_kind(tmp_path, str(known["model_type"]), known, has_bias=bias is not None)
    weight_H = torch.ones(HIDDEN_SIZE) if weight is None else weight.detach()
    head = Head(
        NormWeights(kind, weight_H, None if bias is None else bias.detach()),
        HeadWeights(torch.eye(HIDDEN_SIZE), None, 1.0, None),
        "float32",
    )
    # Small ones, so that the epsilon shows.
    states_NH = 3e-3 * torch.randn(16, HIDDEN_SIZE, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        due = torch.log_softmax(module(states_NH), dim=1)
    assert torch.allclose(head.logprobs(states_NH), due, atol=1e-4)
