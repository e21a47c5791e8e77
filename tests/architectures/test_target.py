"""The tiny models: each is its own, and shows a mistake."""

import itertools
import json

import pytest
import torch

from tests.architectures.recipe import HIDDEN_SIZE, NUM_LAYERS, Recipe
from tests.architectures.recipes import RECIPES
from tests.architectures.target import Unmakeable, digest, make_config, make_model, make_target


def test_a_models_config_says_its_recipes_architecture(tmp_path):
    folder = make_target(tmp_path, Recipe("TeleChat3ForCausalLM", "llama"))
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["TeleChat3ForCausalLM"]
    assert (config["num_hidden_layers"], config["hidden_size"]) == (NUM_LAYERS, HIDDEN_SIZE)
    assert (folder / "model.safetensors").is_file()


def test_norms_differ_from_one_and_every_layer_moves_the_stream():
    model = make_model(Recipe("LlamaForCausalLM", "llama"))
    assert float((model.model.norm.weight.detach() - 1).abs().mean()) > 0.1
    with torch.inference_mode():
        states = model(torch.arange(3, 33)[None], output_hidden_states=True).hidden_states
    for before, after in itertools.pairwise(states):
        assert float((after - before).norm() / before.norm()) > 0.1


def test_the_same_recipe_gives_the_same_model():
    first, second = (make_model(Recipe("LlamaForCausalLM", "llama")).state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_model_type_that_transformers_does_not_know_cannot_be_made():
    with pytest.raises(Unmakeable, match="has no model type 'no_such_type'"):
        make_config(Recipe("NoSuchForCausalLM", "no_such_type"))


def test_no_two_recipes_have_one_row():
    assert len({digest(recipe) for recipe in RECIPES.values()}) == len(RECIPES)
