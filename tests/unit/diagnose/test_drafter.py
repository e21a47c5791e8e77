"""A checkpoint that cannot be diagnosed is refused by name before any of it runs."""

import json

import pytest
import torch
from safetensors.torch import save_file

from service.diagnose.drafter import Drafter
from service.diagnose.target import TargetWeights
from service.errors import OptionRefused
from service.proof.head_weights import HeadWeights


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "drafter").mkdir()
    return tmp_path / "drafter"


def refused(folder, config=None, tensors=None):
    if config is not None:
        text = config if isinstance(config, str) else json.dumps(config)
        (folder / "config.json").write_text(text)
    if tensors is not None:
        save_file(tensors, folder / "model.safetensors")
    target = TargetWeights(folder, 8, torch.zeros(16, 4), HeadWeights(torch.zeros(16, 4), None, 1.0, None))
    with pytest.raises(OptionRefused) as caught:
        Drafter(folder, target)
    assert caught.value.field == "drafter"
    assert caught.value.cure
    return caught.value.detail


EAGLE3 = {
    "speculators_model_type": "eagle3",
    "speculators_config": {"proposal_methods": [{"speculative_tokens": 3}]},
    "transformer_layer_config": {"hidden_size": 4, "vocab_size": 16},
}
RIGHT = {"fc.weight": torch.zeros(4, 12)}


@pytest.mark.parametrize(
    ("config", "tensors", "said"),
    [
        (None, None, "config.json cannot be read"),
        ("[", None, "config.json cannot be read"),
        ("[]", None, "holds no object"),
        ({"architectures": ["EagleModel"]}, RIGHT, "['EagleModel']"),
        (EAGLE3 | {"speculators_model_type": "medusa"}, RIGHT, "'medusa'"),
        (EAGLE3, None, "no safetensors file"),
        (EAGLE3 | {"transformer_layer_config": [1]}, RIGHT, "no transformer_layer_config"),
        (EAGLE3, {"fc.weight": torch.full((4, 12), torch.nan)}, "fc.weight holds NaN"),
        (EAGLE3, RIGHT | {"lm_head.weight": torch.zeros(9, 4)}, "no d2t of 9 tokens"),
        (EAGLE3, RIGHT | {"d2t": torch.tensor([1]), "t2d": torch.arange(16) < 1}, "d2t and t2d map other"),
        (EAGLE3, RIGHT | {"d2t": torch.arange(16)}, "d2t points outside the target's vocabulary of 16"),
    ],
)
def test_a_bad_checkpoint_is_refused_by_name(folder, config, tensors, said):
    assert said in refused(folder, config, tensors)


def test_pickled_weights_are_never_read(folder):
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04cos\nsystem\n")
    assert "no safetensors file" in refused(folder, EAGLE3)


def test_a_damaged_file_is_refused_by_name(folder):
    (folder / "model.safetensors").write_bytes(b"\xff" * 64)
    assert "cannot be read" in refused(folder, EAGLE3)
