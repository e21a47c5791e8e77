"""The tiny models: each is its own, and shows a mistake."""

import itertools

import pytest
import torch

from tests.architectures.recipe import Recipe
from tests.architectures.recipes import RECIPES
from tests.architectures.target import Unmakeable, digest, make_config, make_model


def test_norms_differ_from_one_and_every_layer_moves_the_stream():
    model = make_model(Recipe("LlamaForCausalLM", "llama"))
    assert float((model.model.norm.weight.detach() - 1).abs().mean()) > 0.1
    with torch.inference_mode():
        states = model(torch.arange(3, 33)[None], output_hidden_states=True).hidden_states
    for before, after in itertools.pairwise(states):
        assert float((after - before).norm() / before.norm()) > 0.1


def test_a_model_type_that_transformers_does_not_know_cannot_be_made():
    with pytest.raises(Unmakeable, match="has no model type 'no_such_type'"):
        make_config(Recipe("NoSuchForCausalLM", "no_such_type"))


def test_no_two_recipes_have_one_row():
    assert len({digest(recipe) for recipe in RECIPES.values()}) == len(RECIPES)
