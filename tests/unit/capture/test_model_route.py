"""The route of a model, decided from its config alone."""

import json
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import vllm
from transformers import AutoConfig
from vllm import ModelRegistry

from connector.plugin import prepare
from service.capture import model_class, model_route
from service.capture.engine import EngineSpec
from service.capture.link import EngineLink
from service.capture.model_class import ModelClass, ask_model_class
from service.capture.model_route import ModelRoute, find_route, registered_route
from service.capture.vllm_engine import engine_arguments
from service.errors import EngineRefused
from service.settings import Settings

SHAPE = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}


@pytest.fixture(autouse=True)
def plugin() -> None:
    """vLLM registers it when it makes its arguments; here some are never made."""
    prepare()


def arguments(folder: Path, architecture: str, model_type: str, **more: Any) -> dict[str, Any]:
    """Write a config without weights, and return what an engine would be asked with."""
    config = AutoConfig.for_model(model_type, **SHAPE, **more).to_dict() | {"architectures": [architecture]}
    return asked(folder, config)


def asked(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    (folder / "config.json").write_text(json.dumps(config))
    spec = EngineSpec(folder, "r", "float32", (1,), SHAPE["hidden_size"], 128, decode=False)
    return engine_arguments(spec, Settings(), EngineLink(), "connector.hidden_states")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "route"),
    [
        ("LlamaForCausalLM", ModelRoute("native", "LlamaForCausalLM")),
        ("Qwen3VLForConditionalGeneration", ModelRoute("native", "Qwen3VLForConditionalGeneration")),
        ("MixtralForCausalLM", ModelRoute("plugin", "MixtralForCausalLM")),
        ("Step3p5ForCausalLM", ModelRoute("plugin", "Step3p5ForCausalLM")),
        ("PhiForCausalLM", ModelRoute("transformers", "TransformersForCausalLM")),
        ("FlexOlmoForCausalLM", ModelRoute("transformers", "TransformersMoEForCausalLM")),
        ("Cohere2ForCausalLM", None),
        ("GPT2LMHeadModel", None),
    ],
)
def test_the_registry_and_the_class_itself_tell_the_route(architecture, route):
    assert registered_route(architecture) == route


@pytest.mark.slow
def test_a_class_that_cannot_be_loaded_here_is_left_to_the_engine():
    """Its kernels need Triton, which the CPU build does not have."""
    assert registered_route("KimiLinearForCausalLM") == ModelRoute("native", "KimiLinearForCausalLM")


def test_a_class_that_another_plugin_registered_is_taken_as_it_is():
    made = type("ByAnother", (ModelRegistry.models["LlamaForCausalLM"].load_model_cls(),), {})
    ModelRegistry.register_model("ByAnotherForCausalLM", made)
    try:
        assert registered_route("ByAnotherForCausalLM") == ModelRoute("native", "ByAnother")
    finally:
        del ModelRegistry.models["ByAnotherForCausalLM"]


def transformers(name: str) -> ModelRoute:
    return ModelRoute("transformers", name, {"hf_overrides": {"architectures": [name]}})


@pytest.mark.engine
@pytest.mark.parametrize(
    ("architecture", "model_type", "more", "route"),
    [
        ("LlamaForCausalLM", "llama", {}, ModelRoute("native", "LlamaForCausalLM")),
        ("GemmaForCausalLM", "gemma", {"head_dim": 16}, ModelRoute("plugin", "GemmaForCausalLM")),
        ("Cohere2ForCausalLM", "cohere2", {}, transformers("TransformersForCausalLM")),
        (
            "Ernie4_5_MoeForCausalLM",
            "ernie4_5_moe",
            {"moe_num_experts": 4},
            transformers("TransformersMoEForCausalLM"),
        ),
    ],
)
def test_a_models_config_decides(tmp_path, architecture, model_type, more, route):
    assert find_route(arguments(tmp_path, architecture, model_type, **more)) == route


@pytest.mark.engine
@pytest.mark.parametrize("plugins", [None, "others"])
def test_a_model_that_no_class_returns_states_of_is_refused_by_name(tmp_path, monkeypatch, plugins):
    if plugins is not None:
        monkeypatch.setenv("VLLM_PLUGINS", plugins)
    config = {"architectures": ["Step3TextForCausalLM"], "model_type": "step3_text", **SHAPE}
    with pytest.raises(EngineRefused, match="Step3TextForCausalLM") as refused:
        find_route(asked(tmp_path, config))
    assert refused.value.field == "model"
    assert "architectures.md" in str(refused.value.cure)


@pytest.mark.engine
def test_where_our_class_is_not_loaded_the_variable_is_named_and_not_the_model(tmp_path, monkeypatch):
    """So that it is no job's fault."""
    monkeypatch.setenv("VLLM_PLUGINS", "others")
    for route in ("registered_route", "_backend_route"):
        monkeypatch.setattr(model_route, route, lambda _: None)
    with pytest.raises(EngineRefused, match="MixtralForCausalLM") as refused:
        find_route(arguments(tmp_path, "MixtralForCausalLM", "mixtral"))
    assert refused.value.field == "VLLM_PLUGINS"


def recurrent(folder: Path, **options: Any) -> dict[str, Any]:
    return arguments(folder, "Qwen3NextForCausalLM", "qwen3_next") | options


@pytest.mark.engine
def test_a_temperature_that_the_engine_leaves_out_for_short_jobs_is_put_back(tmp_path):
    route = find_route(arguments(tmp_path, "Llama4ForCausalLM", "llama4_text", floor_scale=64))
    assert route.overrides == {"override_generation_config": {"attn_temperature_tuning": True}}
    (tmp_path / "generation_config.json").write_text('{"attn_temperature_tuning": false}')
    assert find_route(arguments(tmp_path, "Llama4ForCausalLM", "llama4_text")).overrides == {}
    (tmp_path / "generation_config.json").unlink()
    without = arguments(tmp_path, "Llama4ForCausalLM", "llama4_text", attn_temperature_tuning=False)
    assert find_route(without).overrides == {}


@pytest.mark.engine
def test_the_prefix_cache_is_off_for_recurrent_models(tmp_path):
    route = find_route(recurrent(tmp_path))
    assert route == ModelRoute("native", "Qwen3NextForCausalLM", {"enable_prefix_caching": False})
    assert find_route(recurrent(tmp_path, enable_prefix_caching=False)) == route
    with pytest.raises(EngineRefused, match="recurrent") as refused:
        find_route(recurrent(tmp_path, enable_prefix_caching=True))
    assert refused.value.field == "QUARRY_ENGINE_OPTIONS.enable_prefix_caching"


@pytest.mark.engine
@pytest.mark.parametrize(("version", "is_off"), [("0.28.0", True), ("0.29.0", False)])
@pytest.mark.parametrize(
    ("architecture", "model_type", "window"),
    [
        ("GptOssForCausalLM", "gpt_oss", {"sliding_window": 8}),
        ("Llama4ForCausalLM", "llama4_text", {"attention_chunk_size": 8, "attn_temperature_tuning": False}),
        ("Qwen3ForCausalLM", "qwen3", {"interleaved_sliding_window": [8]}),
    ],
)
def test_the_prefix_cache_is_off_for_windows_while_vllm_does_not_trim_hits_of_the_states(
    tmp_path, monkeypatch, version, is_off, architecture, model_type, window
):
    """It gives a request blocks beyond its hit, which others hold; the sentinels would be written there."""
    monkeypatch.setattr(vllm, "__version__", version)
    off = {"enable_prefix_caching": False}
    assert find_route(arguments(tmp_path, architecture, model_type, **window)).overrides == (
        off if is_off else {}
    )
    asked_for = arguments(tmp_path, architecture, model_type, **window) | {"enable_prefix_caching": True}
    with pytest.raises(EngineRefused, match=r"windows: vLLM 0\.28\.0") if is_off else nullcontext():
        find_route(asked_for)


@pytest.mark.engine
def test_a_model_without_windows_keeps_the_prefix_cache_in_any_vllm(tmp_path, monkeypatch):
    monkeypatch.setattr(vllm, "__version__", "0.28.0")
    assert find_route(arguments(tmp_path, "Qwen3ForCausalLM", "qwen3")).overrides == {}


COMPRESSED = {"quant_method": "compressed-tensors", "config_groups": {}, "ignore": []}
EIGHT_BITS = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
MODELOPT = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}
EIGHT_BIT_CACHE = COMPRESSED | {"kv_cache_scheme": EIGHT_BITS}
KEPT = {"kv_cache_dtype": "bfloat16"}


@pytest.mark.engine
@pytest.mark.parametrize(
    ("quantization", "overrides"),
    [
        (COMPRESSED, {}),
        (EIGHT_BIT_CACHE, KEPT),
        ({"quant_method": "modelopt", "quantization": MODELOPT}, KEPT),
        (COMPRESSED | {"quantization": "int4"}, {}),
    ],
    ids=["none", "llm-compressor", "modelopt", "other words"],
)
def test_keys_and_values_keep_the_models_dtype_where_a_checkpoint_asks_for_fewer_bits(
    tmp_path, quantization, overrides
):
    asked_for = arguments(tmp_path, "LlamaForCausalLM", "llama", quantization_config=quantization)
    assert find_route(asked_for | {"dtype": "bfloat16"}).overrides == overrides


@pytest.mark.engine
def test_keys_and_values_keep_the_models_dtype_where_the_text_alone_or_an_older_key_asks_for_fewer_bits(
    tmp_path,
):
    text = {"model_type": "deepseek_v3", **SHAPE, "quantization_config": EIGHT_BIT_CACHE}
    seeing = {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25"}
    asked_for = asked(tmp_path, seeing | {"text_config": text})
    assert find_route(asked_for | {"dtype": "bfloat16"}).overrides == KEPT
    older = arguments(tmp_path, "LlamaForCausalLM", "llama", compression_config=EIGHT_BIT_CACHE)
    assert find_route(older | {"dtype": "bfloat16"}).overrides == KEPT


@pytest.mark.engine
def test_a_checkpoint_that_asks_for_fewer_bits_is_refused_in_a_dtype_of_which_there_is_no_cache(tmp_path):
    asked_for = arguments(tmp_path, "LlamaForCausalLM", "llama", quantization_config=EIGHT_BIT_CACHE)
    with pytest.raises(EngineRefused, match="keep float32") as refused:
        find_route(asked_for | {"dtype": "float32"})
    assert refused.value.field == "dtype"


@pytest.mark.engine
def test_a_model_whose_class_for_a_gpu_returns_incomplete_states_is_refused(tmp_path):
    with pytest.raises(EngineRefused, match="DeepseekV32ForCausalLM returns incomplete") as refused:
        find_route(arguments(tmp_path, "DeepseekV32ForCausalLM", "deepseek_v32"))
    assert refused.value.field == "model"


def test_a_model_that_also_sees_is_started_for_text_alone(tmp_path):
    assert asked(tmp_path, {})["language_model_only"] is True


def test_no_device_is_touched(monkeypatch):
    import torch

    touched = []
    # The CPU build has no device: what would initialize one is asked instead.
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: touched.append(True))
    registered_route("MixtralForCausalLM")
    assert touched == []


@pytest.mark.slow  # a process that imports vLLM, three times
def test_a_class_is_asked_once_for_each_version_of_its_file(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    (tmp_path / "some_models.py").write_text("class Plain: ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    asked = []

    class Child(ProcessPoolExecutor):
        def submit(self, *question):
            asked.append(question)
            return super().submit(*question)

    monkeypatch.setattr(model_class, "ProcessPoolExecutor", Child)
    for _ in range(2):
        answer = ask_model_class("some_models", "Plain", "Missing")
        assert answer == ModelClass(returns_states=False, has_decoder=False)
    assert len(asked) == 1
    (tmp_path / "some_models.py").write_text("class Plain: ...\nclass Missing: ...\n")
    assert ask_model_class("some_models", "Plain", "Missing").has_decoder
    assert len(asked) == 2
    assert ask_model_class("some_models", "Absent") is None
