"""What the canary takes for right and for wrong, within rounding and within a model's own noise."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import pytest
import torch

from schemas.dataset.manifest import LayerAgreement
from service.errors import StatesWrong
from service.proof.canary import JUDGED_TOKENS, POST_NORM, canary_prompts, judge, judge_by_noise
from service.store.canaries import canary_digest
from tests.support.finished_job import a_canary
from tests.support.plans import identity, provenance
from tests.support.reference_models import HIDDEN_SIZE, NUM_LAYERS, VOCAB_SIZE, TinyModel

LAYER_IDS = (0, 1, 2, NUM_LAYERS)
States = list[dict[int, torch.Tensor]]
Plant = Callable[[States, States], None]
"""Changes the captured states; also gets right ones of every layer."""


@dataclass(frozen=True, slots=True)
class Run:
    """The reference's states in the dtype, and an engine's: computed in float32, rounded at the end."""

    dtype: str
    captured: States
    reference: States

    def judge(self, plant: Plant = lambda *_: None) -> tuple[LayerAgreement, ...]:
        captured = [{k: states.clone() for k, states in prompt.items()} for prompt in self.captured]
        plant(captured, self.reference)
        return judge(captured, self.reference, LAYER_IDS, NUM_LAYERS, self.dtype)


def states_of(model: TinyModel, prompts: list[list[int]]) -> States:
    runs = [model.run(prompt) for prompt in prompts]
    return [run.layers | {POST_NORM: run.post_norm} for run in runs]


def ends(states: States) -> States:
    return [{k: of_layer[-JUDGED_TOKENS:] for k, of_layer in prompt.items()} for prompt in states]


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


@pytest.fixture(scope="module")
def exact(tmp_path_factory) -> States:
    model = TinyModel(tmp_path_factory.mktemp("model"), "llama", "float32")
    return states_of(model, canary_prompts(VOCAB_SIZE, 129))


def noisy(exact: States, seed: int, struck: float = 1 / 3, size: float = 1.0) -> States:
    """Return states of which a share of the tokens is 0.4 off and the others 0.01, as a router does it."""
    draw = torch.Generator().manual_seed(seed)

    def disturbed(states_TH: torch.Tensor) -> torch.Tensor:
        struck_T = torch.rand(len(states_TH), generator=draw) < struck
        size_T1 = size * torch.where(struck_T, 0.4, 0.01)[:, None]
        noise_TH = torch.nn.functional.normalize(torch.randn(states_TH.shape, generator=draw), dim=1)
        length_T1 = torch.linalg.vector_norm(states_TH, dim=1, keepdim=True)
        return states_TH + size_T1 * length_T1 * noise_TH

    return [{k: disturbed(states) for k, states in prompt.items()} for prompt in exact]


def judge_noisy(exact: States, plant: Plant = lambda *_: None) -> tuple[LayerAgreement, ...]:
    captured, rounded = noisy(exact, seed=1), noisy(exact, seed=2)
    plant(captured, noisy(exact, seed=4))
    with pytest.raises(StatesWrong):
        judge(captured, rounded, LAYER_IDS, NUM_LAYERS, "bfloat16")
    return judge_by_noise(captured, rounded, exact, LAYER_IDS, NUM_LAYERS, "bfloat16")


def layer_for(layer_id: int, taken: int) -> Plant:
    """Put another layer's states in the place of one layer's."""

    def plant(captured: States, right: States) -> None:
        for prompt, other in zip(captured, right, strict=True):
            prompt[layer_id] = other[taken]

    return plant


def every_layer_one_too_far(captured: States, right: States) -> None:
    for layer_id in LAYER_IDS:
        layer_for(layer_id, layer_id + 1 if layer_id < NUM_LAYERS else POST_NORM)(captured, right)


def stale_block(captured: States, right: States) -> None:
    captured[2][2][112:] = captured[3][2][112:]


def another_prompt(captured: States, right: States) -> None:
    captured[0][1] = captured[3][1][-1:].clone()


def exchanged(layer_id: int) -> Plant:
    """Exchange two prompts' states: only the 29 tokens behind their common prefix tell them apart."""

    def plant(captured: States, right: States) -> None:
        captured[2][layer_id], captured[3][layer_id] = captured[3][layer_id], captured[2][layer_id]

    return plant


def another_place_of_the_prefix(layer_id: int) -> Plant:
    def plant(captured: States, right: States) -> None:
        captured[3][layer_id][32:48] = captured[3][layer_id][64:80]

    return plant


def filled(prompt: int, value: float) -> Plant:
    def plant(captured: States, right: States) -> None:
        captured[prompt][2][:] = value

    return plant


def stretched(layer_id: int, factor: float, tokens: slice = slice(None)) -> Plant:
    def plant(captured: States, right: States) -> None:
        for prompt in captured:
            prompt[layer_id][tokens] *= factor

    return plant


def one_token_short(captured: States, right: States) -> None:
    captured[1][2] = captured[1][2][:-1]


def much_noisier(captured: States, right: States) -> None:
    for prompt, more in zip(captured, noisy(captured, seed=3), strict=True):
        for k in prompt:
            prompt[k] = prompt[k] + 4 * (more[k] - prompt[k])


def long_stale_end(captured: States, right: States) -> None:
    captured[2][2][96:] = captured[3][2][:33]


AFTER_NORM = f"layer 4 looks like layer {NUM_LAYERS} after the final norm"
OFF_BY_ONE = [(0, 1), (1, 0), (1, 2), (2, 1), (2, 3), (NUM_LAYERS, 3)]
WRONG: list[tuple[Plant, str]] = [
    *((layer_for(layer, taken), f"layer {layer} looks like layer {taken}:") for layer, taken in OFF_BY_ONE),
    (layer_for(NUM_LAYERS, POST_NORM), AFTER_NORM),
    (every_layer_one_too_far, "layer 0 looks like layer 1:"),
    (stale_block, r"layer 2 .*13% of 129 tokens"),
    (another_prompt, r"layer 1 .*100% of 1 token, "),
    *((exchanged(layer), rf"layer {layer} .*2\d% of 129 tokens") for layer in LAYER_IDS),
    *((another_place_of_the_prefix(layer), rf"layer {layer} .*1[12]% of 129 tokens") for layer in LAYER_IDS),
    (filled(1, 0.0), "layer 2 "),
    (filled(1, torch.nan), "layer 2 is not finite"),
    *((stretched(layer, 2.0), f"layer {layer} is 2 times as large as in the model") for layer in LAYER_IDS),
    (stretched(2, 0.8), r"layer 2 is 0\.(8|79\d) times as large as in the model"),
    (stretched(2, 1.05), r"layer 2 is 1.0[45]\d* times as large as in the model"),
    (stretched(2, 2.0, slice(1, None, 4)), "layer 2 is 2 times as large as in the model"),
    (one_token_short, r"layer 2 has shape \[16, 64\], the reference \[17, 64\]"),
]
WRONG_IN_NOISE: list[tuple[Plant, str]] = [
    *((layer_for(1, taken), f"layer 1 looks like layer {taken}") for taken in (0, 2, 3)),
    (layer_for(NUM_LAYERS, POST_NORM), AFTER_NORM),
    (much_noisier, r"layer 0 is .* off the float32 reference in 50% of 276 tokens"),
    (long_stale_end, r"layer 2 is .* in 20% of 129 tokens"),
    (stretched(2, 1.01), r"layer 2 is 1\.01\d* times as large as in the model"),
    (filled(2, torch.nan), "layer 2"),
]


def test_another_right_engine_passes(run):
    layers = run.judge()
    assert [layer.layer_id for layer in layers] == list(LAYER_IDS)
    assert all(layer.best_match_layer == layer.layer_id for layer in layers)
    assert (
        min(layer.cosine for layer in layers)
        > {"bfloat16": 0.998, "float16": 0.99998, "float32": 0.9999999}[run.dtype]
    )


@pytest.mark.parametrize(("plant", "message"), WRONG)
def test_wrong_states_are_refused_by_what_they_are(run, plant, message):
    with pytest.raises(StatesWrong, match=message) as wrong:
        run.judge(plant)
    assert wrong.value.field == "layers"


def test_what_the_reference_loses_by_itself_is_no_fault_of_the_engine(exact):
    layers = judge_noisy(exact)
    report = a_canary().model_copy(update={"layers": layers})
    assert report.noise is not None and "the reference's own in the job's dtype" in report.noise
    for layer in layers:
        assert layer.best_match_layer == layer.layer_id
        assert layer.median_rel_error == pytest.approx(0.01, rel=0.1)
        assert layer.own_median_rel_error == pytest.approx(0.01, rel=0.1)
        assert layer.max_rel_error > 0.45, "two such noises apart"
        assert layer.cosine == pytest.approx(1 / math.hypot(1, 0.4), abs=0.03), (
            "one of both struck most tokens"
        )


@pytest.mark.parametrize(("struck", "size"), [(1 / 3, 1.0), (0.48, 1.0), (0.52, 1.0), (0.8, 1.0), (0.8, 1.8)])
def test_an_engine_with_the_noise_of_the_reference_or_nearly_twice_as_much_passes(exact, struck, size):
    for seed in range(10):
        captured, rounded = noisy(exact, seed, struck, size), noisy(exact, 100 + seed, struck)
        judge_by_noise(captured, rounded, exact, LAYER_IDS, NUM_LAYERS, "bfloat16")


@pytest.mark.parametrize("factor", [0.6, 1.4])
def test_noise_of_most_tokens_explains_no_other_length(exact, factor):
    """The distances alone would allow it."""
    captured, rounded = noisy(exact, 1, struck=0.8), noisy(exact, 2, struck=0.8)
    stretched(2, factor)(captured, exact)
    with pytest.raises(StatesWrong, match=r"layer 2 is \S+ times as large as in the model"):
        judge_by_noise(captured, rounded, exact, LAYER_IDS, NUM_LAYERS, "bfloat16")


@pytest.mark.parametrize(("plant", "message"), WRONG_IN_NOISE)
def test_noise_explains_nothing_that_is_wrong(exact, plant, message):
    with pytest.raises(StatesWrong, match=message):
        judge_noisy(exact, plant)


def test_a_model_without_noise_of_its_own_is_not_judged_by_noise(exact):
    """A stale block of an eighth of a prompt is below the quantiles, and no noise explains it."""
    rounded = [{k: states.bfloat16() for k, states in prompt.items()} for prompt in exact]
    captured = [dict(prompt) for prompt in rounded]
    captured[2][2] = torch.cat([rounded[2][2][:112], rounded[3][2][112:]])
    with pytest.raises(StatesWrong, match="rounding cannot explain the difference in this model"):
        judge_by_noise(captured, rounded, exact, LAYER_IDS, NUM_LAYERS, "bfloat16")


def test_a_bare_layernorms_output_is_told_from_its_input(tmp_path):
    """OLMo's final norm leaves its own output as it is, so that no logit shows the mistake."""
    reference = states_of(TinyModel(tmp_path, "olmo", "bfloat16"), canary_prompts(VOCAB_SIZE, 40))
    captured = [{NUM_LAYERS: prompt[POST_NORM]} for prompt in reference]
    with pytest.raises(StatesWrong, match="after the final norm"):
        judge(captured, reference, (NUM_LAYERS,), NUM_LAYERS, "bfloat16")


def test_an_engine_that_rounds_to_8_bits_may_be_further_away_but_no_layer_off(run):
    """Every layer is 0.15 away from the reference: more than a dtype may be."""
    draw = torch.Generator().manual_seed(3)

    def off(states_TH: torch.Tensor) -> torch.Tensor:
        noise_TH = torch.nn.functional.normalize(torch.randn(states_TH.shape, generator=draw), dim=1)
        size_T1 = states_TH.float().norm(dim=1, keepdim=True)
        return (states_TH.float() + 0.15 * size_T1 * noise_TH).to(states_TH.dtype)

    captured = [{k: off(prompt[k]) for k in LAYER_IDS} for prompt in run.reference]
    with pytest.raises(StatesWrong, match=r"0\.99"):
        judge(captured, run.reference, LAYER_IDS, NUM_LAYERS, run.dtype)
    layers = judge(captured, run.reference, LAYER_IDS, NUM_LAYERS, run.dtype, 8)
    assert [layer.best_match_layer for layer in layers] == list(LAYER_IDS)
    layer_for(2, 1)(captured, captured)
    with pytest.raises(StatesWrong, match="layer 2 looks like layer 1:"):
        judge(captured, run.reference, LAYER_IDS, NUM_LAYERS, run.dtype, 8)


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
    layers = judge(captured, reference, LAYER_IDS, NUM_LAYERS, run.dtype)
    assert [layer.best_match_layer for layer in layers] == list(LAYER_IDS)


def test_close_layers_are_told_apart_in_one_prompt_and_over_all():
    """Layers a hundredth away from the one before, as in deep models."""
    draw = torch.Generator().manual_seed(8)
    reference = []
    for _ in range(4):
        layers = [torch.randn(20, HIDDEN_SIZE, generator=draw)]
        for _ in range(NUM_LAYERS + 1):
            layers.append(layers[-1] + 0.01 * torch.randn(20, HIDDEN_SIZE, generator=draw))
        reference.append(dict(enumerate(layers[:-1])) | {POST_NORM: layers[-1]})
    captured = [{2: prompt[2]} for prompt in reference]
    assert judge(captured, reference, (2,), NUM_LAYERS, "bfloat16")[0].best_match_layer == 2
    captured[3] = {2: reference[3][1]}
    with pytest.raises(StatesWrong, match="layer 2 looks like layer 1: 100% of 20 tokens"):
        judge(captured, reference, (2,), NUM_LAYERS, "bfloat16")
    slightly_nearer = [{2: 0.45 * prompt[2] + 0.55 * prompt[1]} for prompt in reference]
    with pytest.raises(StatesWrong, match="layer 2 looks like layer 1: median distance"):
        judge(slightly_nearer, reference, (2,), NUM_LAYERS, "bfloat16")


def test_a_few_tokens_whose_router_flipped_are_forgiven_and_counted(run):
    def plant(captured: States, right: States) -> None:
        captured[2][2][5:13] += 0.5 * captured[2][2][20:28]

    layer = run.judge(plant)[2]
    assert layer.max_rel_error > 0.1
    assert layer.misfits == pytest.approx(8 / sum(len(prompt[2]) for prompt in run.reference))
    assert run.judge()[2].misfits == 0


@pytest.mark.parametrize(
    ("size", "flipped", "bits", "misfits"),
    [
        (0.01, 0.2, 8, 0.08),  # nearer than 8 bits may be, not than a second run must be
        (0.12, 0.16, None, 0.0),  # further than the dtype explains, as the other tokens almost are
        (0.12, 0.4, None, 0.08),
    ],
)
def test_a_misfit_of_the_canary_is_one_of_a_second_run(size, flipped, bits, misfits):
    """Of 100 tokens 8 are `flipped` off, the others `size`."""
    draw = torch.Generator().manual_seed(6)
    layers = {k: torch.randn(100, HIDDEN_SIZE, generator=draw) for k in (0, 1, POST_NORM)}
    noise_TH = torch.nn.functional.normalize(torch.randn(100, HIDDEN_SIZE, generator=draw), dim=1)
    size_T1 = torch.full((100, 1), size).index_fill(0, torch.arange(8), flipped)
    own_TH = layers[1]
    captured = [{1: own_TH + size_T1 * own_TH.norm(dim=1, keepdim=True) * noise_TH}]
    (layer,) = judge(captured, [layers], (1,), 1, "bfloat16", bits)
    assert layer.misfits == pytest.approx(misfits)


def test_a_sliding_window_that_the_engine_does_not_keep_is_found_in_long_prompts_alone(tmp_path):
    model = TinyModel(tmp_path, "gemma2", "bfloat16")
    prompts = canary_prompts(VOCAB_SIZE, 400)
    captured = ends(states_of(model, prompts))
    model.model.config.sliding_window = 200
    reference = ends(states_of(model, prompts))
    judge(captured[:3], reference[:3], LAYER_IDS, NUM_LAYERS, "bfloat16")
    with pytest.raises(StatesWrong, match="layer 1 fits no layer of the model: 100% of 129 tokens"):
        judge(captured, reference, LAYER_IDS, NUM_LAYERS, "bfloat16")


def test_the_prompts_are_always_the_same_and_begin_alike():
    prompts = canary_prompts(32_000, 4095)
    assert prompts == canary_prompts(32_000, 1153)
    assert [len(prompt) for prompt in prompts] == [1, 17, 129, 1153, 1153]
    assert all(prompts[3][: len(prompt)] == prompt for prompt in prompts[:4])
    assert prompts[3][:1124] == prompts[4][:1124]
    assert prompts[3][1124:] != prompts[4][1124:]
    assert all(8_000 <= token < 24_000 for prompt in prompts for token in prompt)


@pytest.mark.parametrize(("vocab_size", "max_len"), [*product([1, 2, 40], [1, 2, 17, 100, 129, 130, 4095])])
def test_prompts_fit_into_any_model(vocab_size, max_len):
    prompts = canary_prompts(vocab_size, max_len)
    assert min(map(len, prompts)) >= 1
    assert max(map(len, prompts)) == min(max_len, 1153)
    assert all(0 <= token < vocab_size for prompt in prompts for token in prompt)


@pytest.mark.parametrize(
    ("part", "change", "is_same"),
    [
        ("identity", {"model": "b"}, True),
        ("identity", {"revision": "1" * 40}, False),
        ("identity", {"weights_sha256": "9" * 64}, False),
        ("identity", {"tokenizer_sha256": "9" * 64}, False),
        ("identity", {"dtype": "float32"}, False),
        ("identity", {"layer_ids": (2, 4)}, False),
        ("engine", {"version": "2"}, False),
        ("engine", {"device": "cuda"}, False),
        ("engine", {"options": {"enforce_eager": True}}, False),
        (None, {"service_version": "9.9.9"}, False),
        ("identity", {"source_fingerprint": "9" * 64}, True),
    ],
)
def test_the_key_changes_with_all_that_can_change_the_states(part, change, is_same):
    made = provenance(identity())
    if part is not None:
        change = {part: getattr(made, part).model_copy(update=change)}
    assert (canary_digest(made.model_copy(update=change)) == canary_digest(made)) is is_same


def test_a_job_that_0_2_0_captured_finds_its_report_when_this_version_publishes_it():
    recorded = "f41b4d8463c366ed861193fef375159026e463b71e187479219661b3e1a9afa4"
    assert canary_digest(provenance(identity())) == recorded
