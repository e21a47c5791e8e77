"""The committed table: it says what was measured, of every recipe as it is."""

import pytest

from tests.architectures.recipes import RECIPES
from tests.architectures.results import TABLE, LayerNumbers, Matrix, Verdict
from tests.architectures.table import cosine, failing, note_of, passing, pending, render
from tests.architectures.target import digest
from tests.architectures.test_results import a_row

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


def test_a_row_shows_its_worst_layer():
    worse = LayerNumbers(
        layer_id=9,
        min_cosine=0.98,
        median_rel_error=0.01,
        max_rel_error=0.2,
        own_median_rel_error=0.01,
        own_max_rel_error=0.3,
    )
    row = a_row("A").model_copy(update={"layers": (*a_row("A").layers, worse), "route": "native"})
    assert passing(row)[1:6] == ("native", "8-9", "float32", "0.9800", "2.0e-01 (3.0e-01)")


def test_a_row_without_states_says_who_refused_and_what_the_logits_say_without_a_canary():
    row = a_row("A", Verdict.REFUSED).model_copy(
        update={"by": "the canary", "reason": "layer 1 | 2", "logit_rows": 8, "logit_argmax_agree": 7}
    )
    cells = failing(row)
    assert cells[:3] == ("A", "refused", "the canary")
    assert cells[3] == "layer 1 | 2; without a canary 7 of 8 rows pass the logit check"
    assert "layer 1 \\| 2" in render(Matrix(rows=(row,)))


def test_a_recipe_without_a_row_is_named_as_not_measured():
    (said,) = pending(Matrix())
    assert f"{len(RECIPES)} of {len(RECIPES)} recipes" in said
    assert pending(Matrix(rows=tuple(a_row(key) for key in RECIPES))) == ()


def test_a_row_of_an_earlier_recipe_says_so():
    recipe = RECIPES["LlamaForCausalLM"]
    older = a_row(recipe.key)
    assert "earlier form of its recipe" in note_of(older)
    assert note_of(older.model_copy(update={"recipe": digest(recipe)})) == ""


@pytest.mark.parametrize(
    ("value", "text"),
    [(1.0, "1 - 0e+00"), (1 - 3e-12, "1 - 3e-12"), (0.9987, "0.9987"), (1.0000001, "1 - 0e+00")],
)
def test_a_cosine_near_one_is_told_by_its_distance(value, text):
    assert cosine(value) == text
