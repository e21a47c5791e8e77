"""A model that its own rounding takes far: the noise explains its captures, and nothing that is wrong."""

from collections.abc import Callable

import pytest
import torch

from service.errors import StatesWrong
from service.proof.canary import POST_NORM, canary_prompts, judge, judge_by_noise
from tests.support.reference_models import NUM_LAYERS, VOCAB_SIZE, TinyModel

LAYER_IDS = (1, 2, NUM_LAYERS)
States = list[dict[int, torch.Tensor]]


def noisy(exact: States, seed: int) -> States:
    """Return states of which a third of the tokens are 0.4 off and the others 0.01, as a router does it."""
    draw = torch.Generator().manual_seed(seed)

    def disturbed(states_TH: torch.Tensor) -> torch.Tensor:
        struck_T = torch.rand(len(states_TH), generator=draw) < 1 / 3
        size_T1 = torch.where(struck_T, 0.4, 0.01)[:, None]
        noise_TH = torch.nn.functional.normalize(torch.randn(states_TH.shape, generator=draw), dim=1)
        length_T1 = torch.linalg.vector_norm(states_TH, dim=1, keepdim=True)
        return states_TH + size_T1 * length_T1 * noise_TH

    return [{k: disturbed(states) for k, states in prompt.items()} for prompt in exact]


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> States:
    model = TinyModel(tmp_path_factory.mktemp("model"), "llama", "float32")
    runs = [model.run(prompt) for prompt in canary_prompts(VOCAB_SIZE, 129)]
    return [run.layers | {POST_NORM: run.post_norm} for run in runs]


def look(exact: States, plant: Callable[[States], None] = lambda _: None):
    captured, rounded = noisy(exact, seed=1), noisy(exact, seed=2)
    plant(captured)
    with pytest.raises(StatesWrong):
        judge(captured, rounded, LAYER_IDS, NUM_LAYERS, "bfloat16")
    return judge_by_noise(captured, rounded, exact, LAYER_IDS, NUM_LAYERS, "bfloat16")


def test_what_the_reference_loses_by_itself_is_no_fault_of_the_engine(exact):
    report = look(exact)
    assert [layer.best_match_layer for layer in report.layers] == list(LAYER_IDS)
    for layer in report.layers:
        assert layer.median_rel_error == pytest.approx(0.01, rel=0.1)
        assert layer.own_median_rel_error == pytest.approx(0.01, rel=0.1)
        assert layer.max_rel_error == pytest.approx(0.4, rel=0.1)


def test_an_engine_much_noisier_than_the_reference_is_refused(exact):
    def plant(captured: States) -> None:
        for prompt, more in zip(captured, noisy(captured, seed=3), strict=True):
            for k in prompt:
                prompt[k] = prompt[k] + 4 * (more[k] - prompt[k])

    with pytest.raises(StatesWrong, match=r"layer 1 is .* off the float32 reference in 50% of 276 tokens"):
        look(exact, plant)


@pytest.mark.parametrize("taken", [0, 2, 3])
def test_another_layer_is_named(exact, taken):
    def plant(captured: States) -> None:
        for prompt, other in zip(captured, noisy(exact, seed=4), strict=True):
            prompt[1] = other[taken]

    with pytest.raises(StatesWrong, match=f"layer 1 looks like layer {taken}"):
        look(exact, plant)


def test_a_last_layer_after_its_norm_is_named(exact):
    def plant(captured: States) -> None:
        for prompt, other in zip(captured, noisy(exact, seed=4), strict=True):
            prompt[NUM_LAYERS] = other[POST_NORM]

    with pytest.raises(StatesWrong, match="after the final norm"):
        look(exact, plant)


def test_a_prompt_that_ends_with_the_states_of_others_is_refused(exact):
    def plant(captured: States) -> None:
        captured[2][2][96:] = captured[3][2][:33]

    with pytest.raises(StatesWrong, match=r"layer 2 is .* in 20% of 129 tokens"):
        look(exact, plant)


def test_a_model_that_rounding_does_not_take_far_gets_no_second_chance(exact):
    """A stale block of an eighth of a prompt is below the quantiles, and no noise explains it."""
    rounded = [{k: states.bfloat16() for k, states in prompt.items()} for prompt in exact]
    captured = [dict(prompt) for prompt in rounded]
    captured[2][2] = torch.cat([rounded[2][2][:112], rounded[3][2][112:]])
    with pytest.raises(StatesWrong, match="in this model rounding explains nothing"):
        judge_by_noise(captured, rounded, exact, LAYER_IDS, NUM_LAYERS, "bfloat16")


def test_states_that_are_not_finite_are_refused(exact):
    def plant(captured: States) -> None:
        captured[2][2][:] = torch.nan

    with pytest.raises(StatesWrong, match="layer 2"):
        look(exact, plant)
