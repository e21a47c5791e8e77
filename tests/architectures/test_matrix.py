"""Architectures on the real engine: each job ends as the table says.

Two of them in the short form, all in the long one; `make architectures` measures those anew that are due.
"""

import pytest

from tests.architectures.matrix import is_due, measure
from tests.architectures.recipe import Recipe
from tests.architectures.recipes import RECIPES
from tests.architectures.results import Matrix, Row, Verdict
from tests.architectures.target import digest
from tests.architectures.versions import installed

SHORT = {"PhiForCausalLM"}
"""One by the engine's Transformers backend; parity is shown for models of its own classes."""


@pytest.mark.engine
@pytest.mark.parametrize(
    "key", [key if key in SHORT else pytest.param(key, marks=pytest.mark.long) for key in RECIPES]
)
def test_an_architecture_is_captured_as_the_table_says(key, record_property):
    told = Matrix.load().row(key)
    assert told is not None
    row = measure(RECIPES[key])
    record_property(
        "worst relative error", str(max((layer.max_rel_error for layer in row.layers), default=None))
    )
    assert (row.verdict, row.by, row.route) == (told.verdict, told.by, told.route), row.reason


def a_row(key: str) -> Row:
    return Row(
        key=key,
        architecture=key,
        recipe="0" * 12,
        verdict=Verdict.PASS,
        dtype="float32",
        versions={"torch": "1"},
    )


def test_a_recipe_is_due_until_it_was_measured_as_it_is_with_the_installed_versions():
    recipe = Recipe("LlamaForCausalLM", "llama")
    row = a_row(recipe.key).model_copy(update={"recipe": digest(recipe), "versions": installed()})
    older = row.model_copy(update={"versions": installed() | {"transformers": "4.0"}})
    other = row.model_copy(
        update={"recipe": digest(Recipe("LlamaForCausalLM", "llama", {"rope_theta": 1.0}))}
    )
    assert is_due(Matrix(), recipe)
    assert not is_due(Matrix(rows=(row,)), recipe)
    assert is_due(Matrix(rows=(older,)), recipe)
    assert is_due(Matrix(rows=(other,)), recipe)


def test_a_row_of_another_optional_package_still_holds():
    recipe = Recipe("LlamaForCausalLM", "llama")
    row = a_row(recipe.key).model_copy(
        update={"recipe": digest(recipe), "versions": installed() | {"torchvision": "0.1"}}
    )
    assert not is_due(Matrix(rows=(row,)), recipe)
