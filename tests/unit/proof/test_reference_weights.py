import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from service.proof.reference_model import Skeleton, build_skeleton
from service.proof.reference_weights import WeightStream
from tests.architectures.recipes import RECIPES
from tests.architectures.target import make_model
from tests.support.reference_models import TinyModel, edit_config

EMBEDDINGS = "model.embed_tokens"


def open_stream(folder: Path) -> tuple[Skeleton, WeightStream]:
    skeleton = build_skeleton(folder, torch.bfloat16)
    return skeleton, WeightStream(skeleton, folder, torch.bfloat16)


def rewrite(folder: Path, change: dict[str, torch.Tensor | None]) -> None:
    """Put tensors in place of others of the same name, or take them out."""
    file = folder / "model.safetensors"
    tensors = load_file(file) | change
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, file)


def test_an_embedding_that_stands_under_the_name_of_the_head_it_is_tied_to_is_found(tmp_path):
    model = TinyModel(tmp_path, "qwen3", "bfloat16")
    weight = model.model.lm_head.weight.detach().clone()
    rewrite(tmp_path, {f"{EMBEDDINGS}.weight": None, "lm_head.weight": weight})
    skeleton, weights = open_stream(tmp_path)
    weights.load(EMBEDDINGS)
    assert torch.equal(skeleton.model.model.embed_tokens.weight, weight)
    weights.drop()
    assert skeleton.model.model.embed_tokens.weight.is_meta
    assert skeleton.model.lm_head.weight.is_meta


NORM = "model.norm"
OTHER_SHAPE = r"model\.norm\.weight has shape \[3\], the model wants \[64\]"
UP = "model.layers.1.mlp.up_proj.weight"
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32]}


@pytest.mark.parametrize(
    ("part", "change", "config", "message"),
    [
        ("model.layers.1", {UP: None}, {}, rf"hold nothing for {re.escape(UP)}"),
        # An untied embedding is not taken from the head.
        (EMBEDDINGS, {f"{EMBEDDINGS}.weight": None}, {}, r"hold nothing for model\.embed_tokens\.weight"),
        (NORM, {f"{NORM}.weight": torch.ones(3)}, {}, OTHER_SHAPE),
        # Of a quantized model the loader takes tensors of any shape.
        (NORM, {f"{NORM}.weight": torch.ones(3)}, {"quantization_config": FP8}, OTHER_SHAPE),
    ],
    ids=["missing", "missing and untied", "another shape", "another shape, quantized"],
)
def test_a_tensor_that_does_not_fill_the_model_is_named(tmp_path, part, change, config, message):
    TinyModel(tmp_path, "llama", "bfloat16")
    edit_config(tmp_path, **config)
    rewrite(tmp_path, change)
    _, weights = open_stream(tmp_path)
    weights.load("model.layers.0")
    with pytest.raises(ValueError, match=message):
        weights.load(part)


def test_experts_that_do_not_fit_together_are_named(tmp_path):
    make_model(RECIPES["MixtralForCausalLM"]).save_pretrained(tmp_path)
    names = sorted(name for name in load_file(tmp_path / "model.safetensors") if ".experts.0." in name)
    rewrite(tmp_path, {names[0]: torch.ones(3, 3)})
    skeleton, weights = open_stream(tmp_path)
    with pytest.raises(ValueError, match="on tensors destined for"):
        weights.load(skeleton.layers[0])


@pytest.mark.slow
def test_what_a_model_keeps_in_float32_is_loaded_in_float32(tmp_path):
    """DeepSeek-V3's router chooses between experts that are nearly as good by a bias in float32."""
    make_model(RECIPES["DeepseekV3ForCausalLM"]).save_pretrained(tmp_path)
    skeleton, weights = open_stream(tmp_path)
    whole = type(skeleton.model).from_pretrained(tmp_path, dtype=torch.bfloat16).state_dict()
    assert {tensor.dtype for tensor in whole.values()} == {torch.bfloat16, torch.float32}
    for layer in skeleton.layers:
        weights.load(layer)
        of_layer = skeleton.model.get_submodule(layer).state_dict(prefix=f"{layer}.")
        for name, tensor in of_layer.items():
            assert tensor.dtype is whole[name].dtype
            assert torch.equal(tensor, whole[name]), name
        weights.drop()
