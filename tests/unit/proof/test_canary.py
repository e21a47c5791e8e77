from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from schemas.dataset.manifest import CanaryReport
from service.errors import StatesWrong
from service.proof.canary import POST_NORM, canary_key, canary_prompts, judge
from tests.support.plans import identity, provenance
from tests.support.reference_models import HIDDEN_SIZE, NUM_LAYERS, VOCAB_SIZE, TinyModel

LAYER_IDS = (0, 1, 2, NUM_LAYERS)
States = list[dict[int, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Run:
    """The reference's states in the dtype, and an engine's: computed in float32, rounded at the end."""

    dtype: str
    captured: States
    reference: States

    def judge(self, change: Callable[[States], None] = lambda _: None) -> CanaryReport:
        captured = [{k: states.clone() for k, states in prompt.items()} for prompt in self.captured]
        change(captured)
        return judge(captured, self.reference, LAYER_IDS, NUM_LAYERS, self.dtype)


def states_of(model: TinyModel, prompts: list[list[int]]) -> States:
    runs = [model.run(prompt) for prompt in prompts]
    return [run.layers | {POST_NORM: run.post_norm} for run in runs]


@pytest.fixture(
    scope="module",
    params=["llama-bfloat16", "gemma2-bfloat16", "gpt_neox-bfloat16", "qwen3-float16", "llama-float32"],
)
def run(request, tmp_path_factory):
    model_type, dtype = request.param.split("-")
    prompts = canary_prompts(VOCAB_SIZE, 129)
    model = TinyModel(tmp_path_factory.mktemp("model"), model_type, dtype)
    reference = states_of(model, prompts)
    model.model = model.model.to(torch.float32)
    other = states_of(model, prompts)
    captured = [{k: prompt[k].to(getattr(torch, dtype)) for k in LAYER_IDS} for prompt in other]
    return Run(dtype, captured, reference)


def test_another_right_engine_passes(run):
    report = run.judge()
    assert [layer.layer_id for layer in report.layers] == list(LAYER_IDS)
    assert all(layer.best_match_layer == layer.layer_id for layer in report.layers)
    assert report.min_cosine > {"bfloat16": 0.998, "float16": 0.99998, "float32": 0.9999999}[run.dtype]
    assert (report.prompts, report.tokens) == (4, 1 + 17 + 129 + 129)
    assert CanaryReport.model_validate_json(report.model_dump_json()) == report


@pytest.mark.parametrize(("layer_id", "taken"), [(0, 1), (1, 0), (1, 2), (2, 1), (2, 3), (NUM_LAYERS, 3)])
def test_a_layer_that_is_off_by_one_is_named_with_what_it_is(run, layer_id, taken):
    def plant(captured: States) -> None:
        for prompt, want in zip(captured, run.reference, strict=True):
            prompt[layer_id] = want[taken]

    with pytest.raises(StatesWrong, match=f"layer {layer_id} looks like layer {taken}:") as wrong:
        run.judge(plant)
    assert wrong.value.field == "layers"


def test_an_engine_that_counts_every_layer_one_too_far_is_found_at_the_first(run):
    def plant(captured: States) -> None:
        for prompt, want in zip(captured, run.reference, strict=True):
            prompt.update({k: want[k + 1 if k < NUM_LAYERS else POST_NORM] for k in LAYER_IDS})

    with pytest.raises(StatesWrong, match="layer 0 looks like layer 1:"):
        run.judge(plant)


def test_a_last_layer_after_its_norm_is_named(run):
    def plant(captured: States) -> None:
        for prompt, want in zip(captured, run.reference, strict=True):
            prompt[NUM_LAYERS] = want[POST_NORM]

    with pytest.raises(StatesWrong, match=f"layer 4 looks like layer {NUM_LAYERS} after the final norm"):
        run.judge(plant)


def test_a_bare_layernorms_output_is_told_from_its_input(tmp_path):
    """OLMo's final norm leaves its own output as it is, so that no logit shows the mistake."""
    model = TinyModel(tmp_path, "olmo", "bfloat16")
    reference = states_of(model, canary_prompts(VOCAB_SIZE, 40))
    captured = [{NUM_LAYERS: prompt[POST_NORM]} for prompt in reference]
    with pytest.raises(StatesWrong, match="after the final norm"):
        judge(captured, reference, (NUM_LAYERS,), NUM_LAYERS, "bfloat16")


def test_a_stale_block_at_the_end_of_one_prompt_is_found(run):
    def plant(captured: States) -> None:
        captured[2][2][112:] = captured[3][2][112:]

    with pytest.raises(StatesWrong, match=r"layer 2 .*13% of 129 tokens"):
        run.judge(plant)


def test_the_states_of_another_prompt_are_found(run):
    def plant(captured: States) -> None:
        captured[0][1] = captured[1][1][:1].clone()

    with pytest.raises(StatesWrong, match=r"layer 1 .*100% of 1 tokens"):
        run.judge(plant)


@pytest.mark.parametrize("layer_id", LAYER_IDS)
def test_two_prompts_of_one_prefix_that_have_each_others_states_are_found(run, layer_id):
    """Only the 29 tokens behind the prefix tell them apart."""

    def plant(captured: States) -> None:
        captured[2][layer_id], captured[3][layer_id] = captured[3][layer_id], captured[2][layer_id]

    with pytest.raises(StatesWrong, match=rf"layer {layer_id} .*2\d% of 129 tokens"):
        run.judge(plant)


@pytest.mark.parametrize("layer_id", LAYER_IDS)
def test_a_block_of_another_place_in_a_prefix_from_the_cache_is_found(run, layer_id):
    def plant(captured: States) -> None:
        captured[3][layer_id][32:48] = captured[3][layer_id][64:80]

    with pytest.raises(StatesWrong, match=rf"layer {layer_id} .*1[12]% of 129 tokens"):
        run.judge(plant)


@pytest.mark.parametrize(("value", "message"), [(0.0, "layer 2 "), (float("nan"), "layer 2 is not finite")])
def test_states_of_zero_or_nan_are_found(run, value, message):
    def plant(captured: States) -> None:
        captured[1][2][:] = value

    with pytest.raises(StatesWrong, match=message):
        run.judge(plant)


def rounded(run: Run) -> States:
    """An engine whose every layer is 0.15 away from the reference: more than a dtype may be."""
    draw = torch.Generator().manual_seed(3)
    prompts = []
    for prompt in run.reference:
        off = {}
        for k in LAYER_IDS:
            noise = torch.randn(prompt[k].shape, generator=draw)
            size = prompt[k].float().norm(dim=1, keepdim=True) / noise.norm(dim=1, keepdim=True)
            off[k] = (prompt[k].float() + 0.15 * size * noise).to(prompt[k].dtype)
        prompts.append(off)
    return prompts


def test_an_engine_that_rounds_to_8_bits_may_be_further_away_but_no_layer_off(run):
    captured = rounded(run)
    with pytest.raises(StatesWrong, match=r"0\.99"):
        judge(captured, run.reference, LAYER_IDS, NUM_LAYERS, run.dtype)
    report = judge(captured, run.reference, LAYER_IDS, NUM_LAYERS, run.dtype, 8)
    assert [layer.best_match_layer for layer in report.layers] == list(LAYER_IDS)
    shifted = [{**prompt, 2: prompt[1]} for prompt in captured]
    with pytest.raises(StatesWrong, match="layer 2 looks like layer 1:"):
        judge(shifted, run.reference, LAYER_IDS, NUM_LAYERS, run.dtype, 8)


def test_a_prompt_with_too_few_states_is_found(run):
    def plant(captured: States) -> None:
        captured[1][2] = captured[1][2][:-1]

    with pytest.raises(StatesWrong, match=r"layer 2 has shape \[16, 64\], the reference \[17, 64\]"):
        run.judge(plant)


def test_a_token_at_which_layers_cannot_be_told_apart_does_not_count_against_its_layer(run):
    """A massive first token is the same in neighbouring layers but for rounding."""
    reference = [dict(prompt) for prompt in run.reference]
    for prompt in reference:
        massive = 100 * prompt[1][0]
        for layer_id in (1, 2, 3):
            prompt[layer_id] = torch.cat([massive[None], prompt[layer_id][1:]])
    captured = [
        {k: prompt[k] + (prompt[k] * 2**-9).to(prompt[k].dtype) for k in LAYER_IDS} for prompt in reference
    ]
    report = judge(captured, reference, LAYER_IDS, NUM_LAYERS, run.dtype)
    assert [layer.best_match_layer for layer in report.layers] == list(LAYER_IDS)


def close_layers(num_prompts: int = 4) -> States:
    """Layers 0..4 and the post-norm, each a hundredth away from the one before, as in deep models."""
    draw = torch.Generator().manual_seed(8)
    prompts = []
    for _ in range(num_prompts):
        layers = [torch.randn(20, HIDDEN_SIZE, generator=draw)]
        for _ in range(NUM_LAYERS + 1):
            layers.append(layers[-1] + 0.01 * torch.randn(20, HIDDEN_SIZE, generator=draw))
        prompts.append(dict(enumerate(layers[:-1])) | {POST_NORM: layers[-1]})
    return prompts


def test_close_layers_are_told_apart_even_in_one_prompt():
    reference = close_layers()
    captured = [{2: prompt[2]} for prompt in reference]
    assert judge(captured, reference, (2,), NUM_LAYERS, "bfloat16").layers[0].best_match_layer == 2
    captured[3] = {2: reference[3][1]}
    with pytest.raises(StatesWrong, match="layer 2 looks like layer 1: 100% of 20 tokens"):
        judge(captured, reference, (2,), NUM_LAYERS, "bfloat16")


def test_states_slightly_nearer_to_another_layer_everywhere_are_found():
    reference = close_layers()
    captured = [{2: 0.45 * prompt[2] + 0.55 * prompt[1]} for prompt in reference]
    with pytest.raises(StatesWrong, match="layer 2 looks like layer 1: median distance"):
        judge(captured, reference, (2,), NUM_LAYERS, "bfloat16")


def test_a_few_tokens_whose_router_flipped_are_forgiven(run):
    def plant(captured: States) -> None:
        captured[2][2][5:13] += 0.5 * captured[2][2][20:28]

    report = run.judge(plant)
    assert report.layers[2].max_rel_error > 0.1


def test_the_prompts_are_always_the_same_and_share_a_prefix():
    prompts = canary_prompts(32_000, 2048)
    assert prompts == canary_prompts(32_000, 2048)
    assert [len(prompt) for prompt in prompts] == [1, 17, 129, 129]
    assert prompts[2][:100] == prompts[3][:100]
    assert prompts[2][100:] != prompts[3][100:]
    assert all(8_000 <= token < 24_000 for prompt in prompts for token in prompt)


@pytest.mark.parametrize("max_len", [1, 2, 17, 100, 128])
@pytest.mark.parametrize("vocab_size", [1, 2, 40])
def test_prompts_fit_into_any_model(vocab_size, max_len):
    prompts = canary_prompts(vocab_size, max_len)
    assert all(1 <= len(prompt) <= max_len for prompt in prompts)
    assert all(0 <= token < vocab_size for prompt in prompts for token in prompt)


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("identity", {"model": "b"}),
        ("identity", {"revision": "1" * 40}),
        ("identity", {"dtype": "float32"}),
        ("identity", {"layer_ids": (2, 4)}),
        ("engine", {"version": "2"}),
        ("engine", {"device": "cuda"}),
        ("engine", {"options": {"enforce_eager": True}}),
        (None, {"service_version": "0.2.0"}),
    ],
)
def test_the_key_changes_with_all_that_can_change_the_states(part, change):
    made = provenance(identity())
    other = changed(made, part, change)
    assert canary_key(other) != canary_key(made)


def test_the_key_does_not_change_with_the_source():
    made = provenance(identity())
    assert canary_key(changed(made, "identity", {"source_fingerprint": "9" * 64})) == canary_key(made)


def changed(made, part, change):
    if part is not None:
        change = {part: getattr(made, part).model_copy(update=change)}
    return made.model_copy(update=change)
