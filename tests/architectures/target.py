"""Makes a recipe's model: random weights that show every mistake, saved by transformers as safetensors."""

import dataclasses
import hashlib
import importlib
import json
import re
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.utils.logging import disable_progress_bar

from examples.tiny_target import Recipe as Tokens, make_tokenizer
from tests.architectures.recipe import SHAPE, VOCAB_SIZE, Recipe

NORM_SPREAD, WEIGHT_STD, ROUTER_STD = 0.3, 0.08, 0.32
"""A router decides clearly, as a trained one does: else rounding sends many tokens to other experts."""
_ROUTER = re.compile(r"(?:.*\.)?(?:gate|router)\.weight")


class Unmakeable(ValueError):
    """transformers has no such model, so there is nothing that a capture could be held against."""


def digest(recipe: Recipe) -> str:
    """Return what a measured row is remembered under, beside the versions: all that makes the model's job."""
    parts = (
        repr(dataclasses.replace(recipe, note="")),
        repr(SHAPE),
        repr((NORM_SPREAD, WEIGHT_STD, ROUTER_STD)),
    )
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


def make_config(recipe: Recipe) -> Any:
    """Return the config: the common shape as far as the class knows it, then what the recipe says."""
    if recipe.model_type not in transformers.CONFIG_MAPPING:
        raise Unmakeable(f"transformers {transformers.__version__} has no model type {recipe.model_type!r}")
    kind = transformers.CONFIG_MAPPING[recipe.model_type]
    if kind not in getattr(transformers, recipe.loader)._model_mapping:
        raise Unmakeable(
            f"transformers {transformers.__version__} has no language model's head for {recipe.model_type!r}"
        )
    if recipe.text is None:
        return kind(**(known_shape(kind()) | recipe.config))
    return kind(**recipe.config, text_config=known_shape(kind().get_text_config()) | recipe.text)


def known_shape(default: Any) -> dict[str, Any]:
    """Return those keys of the common shape that a config class has a field for."""
    known = default.to_dict().keys() | default.attribute_map.keys()
    return {key: value for key, value in SHAPE.items() if key in known}


def make_model(recipe: Recipe) -> Any:
    """Return the model in float32, every weight redrawn: vectors around 1, matrices around 0.

    Weights are wide enough that every layer moves the residual stream, and norms differ from 1, so that a
    missing norm, a wrong layer or another sample's row shows.
    """
    config = make_config(recipe)
    torch.manual_seed(0)
    model = getattr(transformers, recipe.loader).from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.state_dict().items():
            if not weight.is_floating_point():
                continue
            noise = torch.randn(weight.shape, generator=generator)
            around_one = weight.ndim < 2 and "correction_bias" not in name
            std = ROUTER_STD if _ROUTER.fullmatch(name) else WEIGHT_STD
            weight.copy_(1 + NORM_SPREAD * noise if around_one else std * noise)
    return model


def make_target(folder: Path, recipe: Recipe) -> Path:
    """Write the model in the recipe's dtype, with a small tokenizer, and return its folder."""
    if recipe.made_by:
        module, function = recipe.made_by.split(":")
        getattr(importlib.import_module(module), function)(folder)
        return folder
    disable_progress_bar()
    make_model(recipe).to(getattr(torch, recipe.dtype)).save_pretrained(folder)
    # It writes the name of the class that made the model, which a namesake's is not.
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": [recipe.name]}, indent=1))
    make_tokenizer(Tokens(vocab=VOCAB_SIZE)).save_pretrained(folder)
    return folder
