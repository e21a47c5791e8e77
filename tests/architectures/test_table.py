"""The committed table: it says what was measured, of every recipe as it is."""

import pytest

from tests.architectures.recipes import RECIPES
from tests.architectures.results import TABLE, Matrix, Verdict
from tests.architectures.table import render
from tests.architectures.target import digest

PROMISED = (
    "Llama Qwen2 Qwen3 Qwen3Moe Mistral Mixtral Gemma2 Gemma3 Phi Olmo GptOss DeepseekV2 DeepseekV3 "
    "Qwen3Next Qwen3_5 Granite Step3p5"
)


def test_the_committed_table_is_made_from_the_committed_results():
    assert TABLE.read_text() == render(Matrix.load()), "run make architectures"


def test_every_recipe_was_measured_as_it_is_and_every_row_has_one():
    measured = {row.key: row.recipe for row in Matrix.load().rows}
    assert measured == {key: digest(recipe) for key, recipe in RECIPES.items()}, "run make architectures"


def test_no_job_stored_states_that_are_not_the_models():
    assert [row.key for row in Matrix.load().rows if row.verdict is Verdict.WRONG] == []


@pytest.mark.parametrize("name", PROMISED.split())
def test_what_was_promised_stands_in_the_table(name):
    assert any(row.architecture == f"{name}ForCausalLM" for row in Matrix.load().rows)


def test_every_target_that_the_engine_lists_as_text_stands_in_the_table():
    matrix = Matrix.load()
    assert matrix.listed
    assert set(matrix.listed["text"]) - {row.architecture for row in matrix.rows} == set()
