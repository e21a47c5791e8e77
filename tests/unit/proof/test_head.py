import itertools
import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load, load_file, save_file

from schemas.identity import FinalNorm
from service.errors import EngineRefused
from service.proof.head import Head, Opinion, final_norm_bytes
from service.proof.head_weights import HeadWeights, NormWeights
from tests.support.reference_models import HIDDEN_SIZE, MODEL_TYPES, NUM_LAYERS, VOCAB_SIZE, TinyModel


def token_ids(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist()


def all_tokens(head: Head, row_H: torch.Tensor) -> Opinion:
    """Return the head's opinion of one state on every token."""
    return head.opinion(row_H.expand(head.vocab_size, -1), torch.arange(head.vocab_size))


@pytest.fixture(
    scope="module", params=itertools.product(MODEL_TYPES, ("float32", "bfloat16", "float16")), ids="-".join
)
def loaded(request, tmp_path_factory) -> tuple[TinyModel, Head]:
    model_type, dtype = request.param
    model = TinyModel(tmp_path_factory.mktemp("model"), model_type, dtype)
    return model, Head.load(model.folder, dtype)


def test_logprobs_from_the_pre_norm_state_are_the_models_own_within_rounding(loaded):
    model, head = loaded
    assert head.final_norm == model.final_norm
    for seed in range(6):
        says = model.run(token_ids(9, seed))
        state = says.layers[NUM_LAYERS][-1]
        told = all_tokens(head, state)
        sigmas = (told.logprob - says.logprobs).abs() / told.sigma
        assert sigmas.max() < 5
        assert sigmas.square().mean() < 1.5
        torch.testing.assert_close(head.logprobs(state[None])[0], told.logprob)


def test_a_wrong_state_is_many_sigmas_away(loaded):
    model, head = loaded
    says = model.run(token_ids(9))
    wrongs = [says.layers[NUM_LAYERS - 1], says.layers[NUM_LAYERS].roll(1, dims=0)]
    if not torch.all(head.norm_weight == 1):
        # A LayerNorm without a weight, OLMo's, leaves what it has normed as it is: only the canary sees that.
        wrongs.append(says.post_norm)
    for wrong in wrongs:
        told = all_tokens(head, wrong[-1])
        sigmas = (told.logprob - says.logprobs).abs() / told.sigma
        assert sigmas.square().mean().sqrt() > 4


def test_an_engine_that_rounds_differently_stays_within_rounding():
    """4,000 rows with massive elements; the engine norms the unrounded state, rounds before and after the
    weight, and stores its logits in the dtype."""
    generator = torch.Generator().manual_seed(1)
    hidden_size, vocab_size, dtype = 256, 512, torch.bfloat16
    weight = (1 + 0.3 * torch.randn(hidden_size, generator=generator)).to(dtype)
    matrix = (0.15 * torch.randn(vocab_size, hidden_size, generator=generator)).to(dtype)
    norm = NormWeights(FinalNorm(kind="rmsnorm", eps=1e-6), weight, None)
    head = Head(norm, HeadWeights(matrix, None, 1.0, None), "bfloat16")
    states = torch.randn(4000, hidden_size, generator=generator) * 3
    states[::2, :2] *= 100
    normed = states * torch.rsqrt(states.square().mean(dim=1, keepdim=True) + 1e-6)
    logits = (normed.to(dtype) * weight) @ matrix.T
    engine = torch.log_softmax(logits.float(), dim=1)
    top = engine.argmax(dim=1)
    told = head.opinion(states.to(dtype), top)
    sigmas = (told.logprob - engine[torch.arange(4000), top]).abs() / told.sigma
    assert sigmas.max() < 6
    # Not all of the roundings that are allowed for happen here, but most: were the deviations much too large,
    # nothing small would ever be found.
    assert 0.4 < sigmas.square().mean().sqrt() < 0.7
    swapped = told.own_token != top
    assert swapped.any()
    gaps = head.gaps(states.to(dtype), torch.stack([told.own_token, top], dim=1))
    assert (gaps.gap / gaps.sigma)[swapped, 1].max() < 6
    assert torch.all(gaps.gap[~swapped] == 0)


def test_a_padded_vocabulary_is_cut_to_the_configs(tmp_path):
    TinyModel(tmp_path, "llama", "float32")
    weights = load_file(tmp_path / "model.safetensors")
    weights["lm_head.weight"] = torch.cat([weights["lm_head.weight"], torch.full((64, HIDDEN_SIZE), 9.0)])
    save_file(weights, tmp_path / "model.safetensors")
    assert Head.load(tmp_path, "float32").vocab_size == VOCAB_SIZE


def test_a_head_smaller_than_the_vocabulary_is_refused_by_name(tmp_path):
    TinyModel(tmp_path, "llama", "float32")
    weights = load_file(tmp_path / "model.safetensors")
    weights["lm_head.weight"] = weights["lm_head.weight"][:100].clone()
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(EngineRefused, match=r"lm_head.weight has 100 rows for a vocabulary of 512"):
        Head.load(tmp_path, "float32")


def test_weights_spread_over_several_files_are_found_by_their_index(tmp_path):
    model = TinyModel(tmp_path, "llama", "float32", shard_size="100KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    assert torch.equal(Head.load(tmp_path, "float32").norm_weight, model.model.model.norm.weight)


def test_the_norm_of_a_vision_tower_or_an_mtp_block_is_never_taken(tmp_path):
    model = TinyModel(tmp_path, "llama", "float32")
    weights = load_file(tmp_path / "model.safetensors")
    for name in ("mtp.norm.weight", "vision_tower.norm.weight", "model.visual.norm.weight"):
        weights[name] = torch.zeros(HIDDEN_SIZE)
    save_file(weights, tmp_path / "model.safetensors")
    assert torch.equal(Head.load(tmp_path, "float32").norm_weight, model.model.model.norm.weight)


def test_weights_below_a_language_model_prefix_are_found(tmp_path):
    model = TinyModel(tmp_path, "llama", "float32")
    weights = load_file(tmp_path / "model.safetensors")
    below = {f"language_model.{name}": tensor for name, tensor in weights.items()}
    save_file(below, tmp_path / "model.safetensors")
    assert torch.equal(Head.load(tmp_path, "float32").norm_weight, model.model.model.norm.weight)


def test_two_tensors_that_could_be_the_final_norm_are_refused_by_name(tmp_path):
    TinyModel(tmp_path, "llama", "float32")
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.final_layernorm.weight"] = torch.ones(HIDDEN_SIZE)
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(EngineRefused, match=r"model.final_layernorm.weight.*model.norm.weight"):
        Head.load(tmp_path, "float32")


@pytest.mark.parametrize(
    ("drop", "message"),
    [
        ("model.norm.weight", "named like a final norm"),
        ("lm_head.weight", "named like an output head"),
    ],
)
def test_a_missing_tensor_is_refused_by_name(tmp_path, drop, message):
    TinyModel(tmp_path, "llama", "float32")
    weights = load_file(tmp_path / "model.safetensors")
    del weights[drop]
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(EngineRefused, match=message) as refusal:
        Head.load(tmp_path, "float32")
    assert refusal.value.field == "model"


def test_a_quantized_head_is_refused_by_name(tmp_path):
    TinyModel(tmp_path, "llama", "float32")
    weights = load_file(tmp_path / "model.safetensors")
    weights["lm_head.weight"] = weights["lm_head.weight"].to(torch.int8)
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(EngineRefused, match="quantized head"):
        Head.load(tmp_path, "float32")


def test_a_bias_on_a_norm_that_is_no_layernorm_is_refused(tmp_path):
    TinyModel(tmp_path, "llama", "float32")
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.norm.bias"] = torch.zeros(HIDDEN_SIZE)
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(EngineRefused, match="'llama' is not known to end in a LayerNorm"):
        Head.load(tmp_path, "float32")


def test_a_model_type_unknown_to_transformers_is_read_from_its_own_config(tmp_path):
    model = TinyModel(tmp_path, "llama", "float32")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "of_its_own"}))
    assert Head.load(tmp_path, "float32").final_norm == model.final_norm
    del config["rms_norm_eps"]
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "of_its_own"}))
    with pytest.raises(EngineRefused, match="no epsilon of the final norm"):
        Head.load(tmp_path, "float32")


def test_a_norm_that_cannot_be_told_in_the_manifest_is_refused(tmp_path):
    TinyModel(tmp_path, "llama", "float32")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "nemotron", "norm_eps": 1e-5}))
    with pytest.raises(EngineRefused, match=r"nemotron is a LayerNorm that multiplies by \(1 \+ weight\)"):
        Head.load(tmp_path, "float32")


@pytest.mark.parametrize("content", [b"", b"not safetensors at all"])
def test_a_broken_weight_file_is_refused(tmp_path, content):
    TinyModel(tmp_path, "llama", "float32")
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(EngineRefused, match="cannot be read"):
        Head.load(tmp_path, "float32")


def test_a_folder_without_safetensors_is_refused_with_a_cure(tmp_path):
    TinyModel(tmp_path, "llama", "float32")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(EngineRefused, match="neither") as refusal:
        Head.load(tmp_path, "float32")
    assert refusal.value.cure is not None


def test_a_folder_without_a_config_is_refused(tmp_path):
    with pytest.raises(EngineRefused, match=r"config\.json cannot be read"):
        Head.load(tmp_path, "float32")


@pytest.mark.parametrize("model_type", ["llama", "gpt_neox", "olmo"])
def test_the_final_norm_file_makes_the_post_norm_state(tmp_path, model_type):
    model = TinyModel(tmp_path, model_type, "float32")
    says = model.run(token_ids(5))
    content = final_norm_bytes(tmp_path)
    (tmp_path / "final_norm.safetensors").write_bytes(content)
    with safe_open(tmp_path / "final_norm.safetensors", framework="pt") as file:
        about = FinalNorm.model_validate_json(file.metadata()["final_norm"])
    parts = load(content)
    x = says.layers[NUM_LAYERS]
    if about.kind == "layernorm":
        x = x - x.mean(dim=1, keepdim=True)
    post = x * torch.rsqrt(x.square().mean(dim=1, keepdim=True) + about.eps) * parts["weight"]
    torch.testing.assert_close(post + parts.get("bias", 0), says.post_norm)


def test_the_final_norm_file_is_the_same_bytes_each_time(tmp_path):
    """safetensors orders metadata keys at random, anew in each process: with one key there is one order."""
    TinyModel(tmp_path, "gpt_neox", "float32")
    content = final_norm_bytes(tmp_path)
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    assert list(header["__metadata__"]) == ["final_norm"]
    assert content == final_norm_bytes(tmp_path)
