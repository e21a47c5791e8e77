"""A checkpoint that cannot be diagnosed is refused by name before any of it runs."""

import json

import pytest
import torch
from safetensors.torch import save_file

from service.diagnose.drafter import Drafter, TargetWeights
from service.errors import OptionRefused


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
    weights = TargetWeights(folder, torch.zeros(16, 4), torch.zeros(16, 4), 8)
    with pytest.raises(OptionRefused) as caught:
        Drafter(folder, weights)
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
        (EAGLE3 | {"speculators_config": {}}, RIGHT, "speculators_config"),
        (EAGLE3 | {"speculators_config": {"proposal_methods": [{"speculative_tokens": 10**9}]}}, RIGHT, "10"),
        (EAGLE3, None, "no safetensors file"),
        (EAGLE3 | {"eagle_aux_hidden_state_layer_ids": ["2", 4, 5]}, RIGHT, "expected layer ids"),
        (EAGLE3 | {"eagle_aux_hidden_state_layer_ids": 2}, RIGHT, "expected layer ids"),
        (EAGLE3 | {"transformer_layer_config": [1]}, RIGHT, "no transformer_layer_config"),
        (EAGLE3, {"fc.weight": torch.full((4, 12), torch.nan)}, "fc.weight holds NaN"),
        (EAGLE3, {"fc.weight": torch.zeros(4, 9)}, "width of fc.weight is 9, expected 12"),
        (
            EAGLE3 | {"transformer_layer_config": {"hidden_size": 8, "vocab_size": 16}},
            RIGHT,
            "another target: its hidden size is 8, expected 4",
        ),
        (
            EAGLE3 | {"transformer_layer_config": {"hidden_size": 4, "vocab_size": 99}},
            RIGHT,
            "another target: its vocabulary is 99, expected 16",
        ),
        (EAGLE3 | {"eagle_aux_hidden_state_layer_ids": [2, 4, 9]}, RIGHT, "layers [9]"),
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
