"""What an operator may not tell the engine is refused by name, with a cure, before the engine starts."""

import dataclasses
from pathlib import Path

import pytest

from schemas.generate import Generate
from schemas.identity import EngineInfo
from service.capture.engine_options import (
    OURS,
    RULES,
    check_engine_options,
    check_generate,
    check_started,
    recorded_plugins,
    recorded_variables,
)
from service.errors import EngineDied, EngineRefused

KNOWN = {*OURS, *RULES, "async_scheduling", "block_size", "enforce_eager", "max_num_seqs"}


def refusal(options):
    with pytest.raises(EngineRefused) as caught:
        check_engine_options(options, KNOWN)
    (name,) = options
    assert caught.value.field == f"QUARRY_ENGINE_OPTIONS.{name}"
    assert repr(name) in caught.value.detail
    assert caught.value.cure
    return caught.value


TWO_ENGINES = ("hybrid_lb", "external_lb", "multi_port_external_lb")
SPOILING = {
    **dict.fromkeys((f"data_parallel_{name}" for name in TWO_ENGINES), True),
    **dict.fromkeys(("trust_remote_code", "enable_dbo", "kv_sharing_fast_prefill", "enable_lora"), True),
    **dict.fromkeys(
        ("pipeline_parallel_size", "data_parallel_size", "data_parallel_size_local", "nnodes"), 2
    ),
    **dict.fromkeys(("prefill_context_parallel_size", "decode_context_parallel_size"), 2),
    **dict.fromkeys(("data_parallel_rank", "data_parallel_start_rank"), 0),
    **dict.fromkeys(("max_num_queued_reqs", "max_num_queued_tokens"), 5),
    "distributed_executor_backend": "ray",
    "kv_cache_dtype": "fp8",
    "generation_config": "vllm",
    "logits_processors": ["a_package:Processor"],
    "watermark_config": {"key": 1},
    "runner": "pooling",
    "convert": "embed",
    "logprobs_mode": "processed_logprobs",
    "max_logprobs": 1,
}


@pytest.mark.parametrize("name", RULES)
def test_an_option_that_would_spoil_or_lose_rows_is_refused(name):
    assert f"cannot be {SPOILING[name]!r}: " in refusal({name: SPOILING[name]}).detail


@pytest.mark.parametrize("name", list(OURS))
def test_what_quarry_sets_itself_is_refused(name):
    assert "set by Quarry itself" in refusal({name: "anything"}).detail


def test_harmless_values_of_the_same_options_pass():
    harmless = {
        "trust_remote_code": False,
        "pipeline_parallel_size": 1,
        "data_parallel_size": 1,
        "distributed_executor_backend": "mp",
        "kv_cache_dtype": "auto",
        "generation_config": "auto",
        "enable_lora": False,
        "runner": "generate",
        "max_logprobs": 20,
        "async_scheduling": True,
    }
    check_engine_options(harmless, KNOWN)
    check_engine_options({"block_size": 32, "max_num_seqs": 8, "enforce_eager": True}, KNOWN)
    nested = {"compilation_config": {"custom_ops": ["none"], "pass_config": {"fuse_norm_quant": False}}}
    check_engine_options(nested, KNOWN | nested.keys())


@pytest.mark.parametrize(
    ("name", "cure"),
    [("max_num_seq", "max_num_seqs"), ("zzz", "EngineArgs"), ("_api_process_count", "EngineArgs")],
)
def test_an_unknown_or_private_name_is_refused_with_its_neighbours_if_any(name, cure):
    refused = refusal({name: 8})
    assert "no option" in refused.detail and cure in str(refused.cure)


def test_the_installed_engine_knows_every_name_that_is_refused():
    """A name that the engine gave up would be refused as unknown; one that it renamed would pass."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    known = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    assert {*OURS, *RULES} - known == set()


def test_the_engines_own_values_are_harmless_where_it_names_them():
    from vllm.engine.arg_utils import AsyncEngineArgs

    own = {
        field.name: getattr(AsyncEngineArgs, field.name, None)
        for field in dataclasses.fields(AsyncEngineArgs)
    }
    check_engine_options({name: own[name] for name in {*RULES}}, KNOWN)


def engine(device="cpu", **options):
    started = {"async_scheduling": False, "chunked_prefill": True, "max_num_batched_tokens": 64} | options
    return EngineInfo(name="vllm", version="0", device=device, options=started)


@pytest.mark.parametrize(
    ("runner", "decode", "right"), [("V1", True, False), ("V1", False, True), ("V2", True, True)]
)
def test_answers_are_captured_under_asynchronous_scheduling_where_the_runner_counts_them_right(
    runner, decode, right
):
    started = engine(async_scheduling=True, model_runner=runner)
    if right:
        check_started(started, decode=decode, max_model_len=128, max_num_scheduled_tokens=None)
    else:
        with pytest.raises(EngineRefused, match="async_scheduling"):
            check_started(started, decode=decode, max_model_len=128, max_num_scheduled_tokens=None)


@pytest.mark.parametrize("name", ["max_num_batched_tokens", "max_num_scheduled_tokens"])
def test_an_engine_that_could_never_take_the_longest_prompt_is_refused(name):
    """vLLM turns chunks off by itself for latent attention on a CPU, and longer prompts wait forever.

    Without chunks, it compares them with the first bound only.
    """
    bounds = {"max_num_batched_tokens": 256, "max_num_scheduled_tokens": 256} | {name: 64}
    scheduled, whole = bounds.pop("max_num_scheduled_tokens"), engine(chunked_prefill=False, **bounds)
    with pytest.raises(EngineRefused, match="128 tokens") as caught:
        check_started(whole, decode=False, max_model_len=128, max_num_scheduled_tokens=scheduled)
    assert caught.value.field == f"QUARRY_ENGINE_OPTIONS.{name}"
    assert "'max_tokens'" in str(caught.value.cure)
    check_started(whole, decode=False, max_model_len=64, max_num_scheduled_tokens=scheduled)
    chunks = engine(**bounds)
    check_started(chunks, decode=False, max_model_len=128, max_num_scheduled_tokens=scheduled)


def test_answers_at_a_temperature_are_refused_on_the_cpu_build_and_only_there():
    drawn = Generate(max_tokens=4, temperature=0.7)
    with pytest.raises(EngineRefused) as caught:
        check_generate(drawn, engine())
    assert caught.value.field == "generate.temperature"
    assert "temperature 0" in str(caught.value.cure)
    check_generate(drawn, engine(device="cuda:0"))
    check_generate(Generate(max_tokens=4, top_p=0.5, seed=1), engine())
    check_generate(None, engine())


def test_variables_that_change_what_is_captured_are_recorded_and_no_other():
    changing = {
        "VLLM_KIMI_K3_AUX_ATTN_RES_STREAM": "1",
        "VLLM_USE_DEEP_GEMM": "0",
        "NVIDIA_TF32_OVERRIDE": "0",
    }
    others = {
        "VLLM_API_KEY": "secret",
        "VLLM_HOST_IP": "10.0.0.1",
        "VLLM_CACHE_ROOT": "/home",
        "HOME": "/root",
    }
    assert recorded_variables(changing | others) == changing


def test_others_plug_ins_are_recorded_and_logits_processors_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """vLLM's model runner V2 applies installed logits processors to every request, named or not."""
    monkeypatch.syspath_prepend(tmp_path)
    assert recorded_plugins(None) == {}  # vLLM has some of its own
    install(tmp_path, "patches", "[vllm.general_plugins]\npatches = patches:apply\nmore = patches:more\n")
    assert recorded_plugins(["patches"]) == recorded_plugins(None) == {"plugins": "patches 1.0"}
    assert recorded_plugins(["quarry"]) == {}
    install(tmp_path, "marks", "[vllm.logits_processors]\nmark = marks:Mark\n")
    with pytest.raises(EngineDied, match=r"marks 1\.0 brings a logits processor") as refused:
        recorded_plugins(["quarry"])
    assert "uninstall" in str(refused.value.cure)


def install(folder: Path, package: str, entry_points: str) -> None:
    facts = folder / f"{package}-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text(entry_points)
