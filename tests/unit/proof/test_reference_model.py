import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from service.errors import EngineRefused
from service.proof.reference_model import build_skeleton
from tests.architectures.recipes import RECIPES
from tests.architectures.target import make_config, make_model
from tests.support.reference_models import NUM_LAYERS, TinyModel, edit_config
from tests.support.step3p5 import step3p5_target


def refusal(folder: Path) -> EngineRefused:
    with pytest.raises(EngineRefused) as refused:
        build_skeleton(folder, torch.bfloat16)
    assert refused.value.field == "canary"
    assert '"canary": "skip"' in (refused.value.cure or "")
    return refused.value


def test_weights_stay_away_and_buffers_that_no_file_holds_are_those_of_the_loaded_model(tmp_path):
    TinyModel(tmp_path, "llama", "bfloat16")
    loaded = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    found = build_skeleton(tmp_path, torch.bfloat16)
    assert all(tensor.is_meta for tensor in found.model.state_dict().values())
    buffers = dict(found.model.named_non_persistent_buffers())
    assert buffers.keys() == dict(loaded.named_non_persistent_buffers()).keys() != set()
    for name, buffer in loaded.named_non_persistent_buffers():
        assert torch.equal(buffers[name], buffer)
    assert found.stages == (*(f"model.layers.{k}" for k in range(NUM_LAYERS)), "model.norm")


def test_the_language_model_inside_of_another_is_found(tmp_path):
    make_model(RECIPES["Gemma3ForConditionalGeneration"]).save_pretrained(tmp_path)
    found = build_skeleton(tmp_path, torch.bfloat16)
    assert found.layers[0] == "model.language_model.layers.0"
    assert found.final_norm == "model.language_model.norm"


def test_an_architecture_that_transformers_lacks_under_that_name_is_built_by_its_model_type(tmp_path):
    TinyModel(tmp_path, "llama", "bfloat16")
    edit_config(tmp_path, architectures=["LLaMAForCausalLM"])
    assert type(build_skeleton(tmp_path, torch.bfloat16).model).__name__ == "LlamaForCausalLM"


def test_step_3_5_is_the_language_model_of_step_3_7(tmp_path):
    found = build_skeleton(step3p5_target(tmp_path / "step3p5"), torch.bfloat16)
    assert found.layers == tuple(f"model.language_model.layers.{k}" for k in range(6))
    text = found.model.config.text_config
    assert (text.num_key_value_heads, text.num_local_experts, text.num_experts_per_tok) == (2, 8, 2)
    heads = [layer.self_attn.num_heads for layer in found.model.model.language_model.layers]
    assert heads == [4, 6, 6, 4, 6, 6]
    assert text.mlp_layer_types == ["dense"] * 3 + ["sparse"] * 3


def test_code_that_comes_with_a_model_is_not_run(tmp_path):
    TinyModel(tmp_path, "llama", "bfloat16")
    mark = tmp_path / "ran"
    for name in ("configuration_own", "modeling_own"):
        (tmp_path / f"{name}.py").write_text(f"open({str(mark)!r}, 'w').close()\n")
    code = {"AutoConfig": "configuration_own.Own", "AutoModelForCausalLM": "modeling_own.Own"}
    edit_config(tmp_path, auto_map=code)
    assert type(build_skeleton(tmp_path, torch.bfloat16).model).__name__ == "LlamaForCausalLM"
    edit_config(tmp_path, model_type="own", architectures=["OwnForCausalLM"])
    assert "has no class for OwnForCausalLM, and code that comes" in refusal(tmp_path).detail
    assert not mark.exists()


@pytest.mark.parametrize(
    ("config", "what"),
    [
        ({"model_type": "vit"}, "has no class for vit"),
        (
            {"model_type": "t5", "architectures": ["T5EncoderModel"]},
            "the decoder layers of T5EncoderModel cannot be told",
        ),
        (
            make_config(RECIPES["LongcatFlashForCausalLM"]).to_dict()
            | {"architectures": ["LongcatFlashForCausalLM"]},
            "0 module lists of 8 stand beside its final norm",
        ),
    ],
    ids=["no causal language model", "no final norm known by name", "more layers than modules"],
)
def test_a_model_whose_layers_are_not_clear_is_refused(tmp_path, config, what):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert what in refusal(tmp_path).detail
