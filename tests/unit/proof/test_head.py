import itertools
import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load, load_file, save_file

from schemas.identity import FinalNorm
from service.capture.engine import WITNESS_TOKENS
from service.errors import EngineRefused
from service.proof.head import Head
from service.proof.head_weights import HeadWeights, NormWeights, norm_weight, read_head, text_config
from tests.support.reference_models import HIDDEN_SIZE, MODEL_TYPES, NUM_LAYERS, VOCAB_SIZE, TinyModel

Tensors = dict[str, torch.Tensor | None]


def token_ids(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist()


def sigmas_off(head: Head, rows_NH: torch.Tensor, tokens_NK: torch.Tensor, logprobs_NV: torch.Tensor):
    """Return how far the gaps of rows between their first token and each other are off `logprobs_NV`."""
    gaps, engine_NK = head.gaps(rows_NH, tokens_NK), logprobs_NV.gather(1, tokens_NK)
    return ((gaps.gap - (engine_NK[:, :1] - engine_NK)) / gaps.sigma)[:, 1:].abs()


def of_all_tokens(head: Head, row_H: torch.Tensor, logprobs_V: torch.Tensor) -> torch.Tensor:
    """Return how far the gaps between the most likely token and each other are off."""
    return sigmas_off(head, row_H[None], logprobs_V.argsort(descending=True)[None], logprobs_V[None])


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
        sigmas = of_all_tokens(head, state, says.logprobs)
        assert sigmas.max() < 5
        assert sigmas.square().mean() < 1.5
        logprobs = head.logprobs(state[None])[0]
        torch.testing.assert_close(logprobs, says.logprobs, atol=0.1, rtol=0.02)
        torch.testing.assert_close(
            head.gaps(state[None], torch.tensor([[5, 9]])).gap[0, 1], logprobs[5] - logprobs[9]
        )


def test_a_wrong_state_is_many_sigmas_away(loaded):
    model, head = loaded
    says = model.run(token_ids(9))
    wrongs = [says.layers[NUM_LAYERS - 1], says.layers[NUM_LAYERS].roll(1, dims=0)]
    if not torch.all(head.norm.weight_H == 1):
        # A LayerNorm without a weight, OLMo's, leaves what it has normed as it is: only the canary sees that.
        wrongs.append(says.post_norm)
    for wrong in wrongs:
        assert of_all_tokens(head, wrong[-1], says.logprobs).square().mean().sqrt() > 4


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
    sigmas = sigmas_off(head, states.to(dtype), engine.topk(WITNESS_TOKENS).indices, engine)
    assert sigmas.max() < 6
    # Not all of the roundings that are allowed for happen here, but most: were the deviations much too large,
    # nothing small would ever be found.
    assert 0.4 < sigmas.square().mean().sqrt() < 0.7
    top, own_token = engine.argmax(dim=1), head.logprobs(states.to(dtype)).argmax(dim=1)
    swapped = own_token != top
    assert swapped.any()
    gaps = head.gaps(states.to(dtype), torch.stack([own_token, top], dim=1))
    assert (gaps.gap / gaps.sigma)[swapped, 1].max() < 6
    assert torch.all(gaps.gap[~swapped] == 0)


def edit(folder: Path, tensors: Tensors, config: dict[str, object], rename: str = "{}") -> TinyModel:
    """Save a llama, then put other tensors and config values in place, null to remove them."""
    model = TinyModel(folder, "llama", "float32")
    stored = load_file(folder / "model.safetensors") | tensors
    kept = {rename.format(name): tensor for name, tensor in stored.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors")
    values = json.loads((folder / "config.json").read_text()) | config
    kept = {key: value for key, value in values.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept))
    return model


NORM, HEAD, OWN = "model.norm.weight", "lm_head.weight", {"model_type": "of_its_own"}
OTHER_NORMS = {
    f"{name}.norm.weight": torch.zeros(HIDDEN_SIZE) for name in ("mtp", "vision_tower", "model.visual")
}
NEMOTRON = {"model_type": "nemotron", "norm_eps": 1e-5}


@pytest.mark.parametrize(
    ("tensors", "config", "rename"),
    [
        ({HEAD: torch.full((VOCAB_SIZE + 64, HIDDEN_SIZE), 9.0)}, {}, "{}"),
        (OTHER_NORMS, {}, "{}"),
        ({}, {}, "language_model.{}"),
        ({}, OWN, "{}"),
    ],
    ids=["a padded vocabulary", "norms of towers and mtp blocks", "a prefix", "an unknown model type"],
)
def test_norm_and_head_are_found_beside_what_is_neither(tmp_path, tensors, config, rename):
    model = edit(tmp_path, tensors, config, rename)
    head = Head.load(tmp_path, "float32")
    assert torch.equal(head.norm.weight_H, model.model.model.norm.weight)
    assert (head.final_norm, head.vocab_size) == (model.final_norm, VOCAB_SIZE)


def test_weights_spread_over_several_files_are_found_by_their_index(tmp_path):
    model = TinyModel(tmp_path, "llama", "float32", shard_size="100KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    assert torch.equal(Head.load(tmp_path, "float32").norm.weight_H, model.model.model.norm.weight)
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(EngineRefused, match=r"model\.norm\.weight cannot be read"):
        Head.load(tmp_path, "float32")


@pytest.mark.parametrize(
    ("tensors", "config", "message"),
    [
        ({HEAD: torch.ones(100, HIDDEN_SIZE)}, {}, "lm_head.weight has 100 rows for a vocabulary of 512"),
        ({HEAD: torch.ones(VOCAB_SIZE, 3)}, {}, "shapes that do not fit"),
        ({HEAD: torch.ones(VOCAB_SIZE, HIDDEN_SIZE, dtype=torch.int8)}, {}, "quantized head"),
        ({HEAD: None}, {}, "named like an output head"),
        ({NORM: None}, {}, "named like a final norm"),
        (
            {"model.final_layernorm.weight": torch.ones(HIDDEN_SIZE)},
            {},
            "model.final_layernorm.weight.*model.norm.weight",
        ),
        ({"model.norm.bias": torch.zeros(HIDDEN_SIZE)}, {}, "'llama' is not known to end in a LayerNorm"),
        ({}, OWN | {"rms_norm_eps": None}, "no epsilon of the final norm"),
        ({}, NEMOTRON, r"nemotron is a LayerNorm that multiplies by \(1 \+ weight\)"),
    ],
)
def test_what_is_unsure_is_refused_by_name(tmp_path, tensors, config, message):
    edit(tmp_path, tensors, config)
    with pytest.raises(EngineRefused, match=message) as refusal:
        Head.load(tmp_path, "float32")
    assert refusal.value.field == "model"


@pytest.mark.parametrize("content", [b"", b"not safetensors at all", None])
def test_a_weight_file_that_is_broken_or_missing_is_refused(tmp_path, content):
    TinyModel(tmp_path, "llama", "float32")
    (tmp_path / "model.safetensors").unlink()
    if content is not None:
        (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(EngineRefused, match="neither" if content is None else "cannot be read") as refusal:
        Head.load(tmp_path, "float32")
    assert (refusal.value.cure is None) == (content is not None)


@pytest.mark.parametrize("index", ["[]", '{"weight_map": null}', '{"weight_map": {"model.norm.weight": 3}}'])
def test_a_weight_index_of_another_shape_is_refused(tmp_path, index):
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(EngineRefused, match="the weight index cannot be read"):
        norm_weight(tmp_path)


def test_a_folder_without_a_config_is_refused(tmp_path):
    with pytest.raises(EngineRefused, match=r"config\.json cannot be read"):
        Head.load(tmp_path, "float32")


@pytest.mark.parametrize(
    ("whole", "text", "has_head", "is_tied"),
    [
        (True, True, False, True),
        (True, False, False, True),
        (True, False, True, False),
        (False, False, True, False),
    ],
)
def test_a_multimodal_model_is_tied_by_either_config(tmp_path, whole, text, has_head, is_tied):
    embedding, head = torch.randn(16, 8), torch.randn(16, 8)
    write_gemma3(tmp_path, embedding, head if has_head else None, whole=whole, text=text)
    read = read_head(tmp_path, text_config(tmp_path)).weight_VH
    assert torch.equal(read, embedding if is_tied else head)


def test_a_multimodal_model_that_is_not_tied_needs_a_head_of_its_own(tmp_path):
    write_gemma3(tmp_path, torch.randn(16, 8), None, whole=False, text=False)
    with pytest.raises(EngineRefused, match="no tensor is named like an output head"):
        read_head(tmp_path, text_config(tmp_path))


def write_gemma3(
    folder: Path, embedding: torch.Tensor, head: torch.Tensor | None, *, whole: bool, text: bool
) -> None:
    """Write a multimodal Gemma 3, tied or not by the whole's config and by the text's."""
    text_part = {"model_type": "gemma3_text", "vocab_size": 16, "hidden_size": 8, "tie_word_embeddings": text}
    config = {"model_type": "gemma3", "tie_word_embeddings": whole, "text_config": text_part}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {"model.language_model.embed_tokens.weight": embedding}
    save_file(tensors | ({} if head is None else {HEAD: head}), folder / "model.safetensors")


@pytest.mark.parametrize("model_type", ["llama", "gpt_neox", "olmo"])
def test_the_final_norm_file_makes_the_post_norm_state(tmp_path, model_type):
    model = TinyModel(tmp_path, model_type, "float32")
    says = model.run(token_ids(5))
    content = Head.load(tmp_path, "float32").final_norm_file
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
    content = Head.load(tmp_path, "float32").final_norm_file
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    assert list(header["__metadata__"]) == ["final_norm"]
    assert content == Head.load(tmp_path, "float32").final_norm_file
