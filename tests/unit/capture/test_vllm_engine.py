"""What becomes of a model that vLLM's own code stumbles over, before any process is started."""

import asyncio
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import DbrxConfig
from vllm import platforms
from vllm.config import parallel

from schemas.digest import canonical_sha256
from service.capture import vllm_engine
from service.capture.engine import EngineSpec, Prompt
from service.capture.link import EngineLink
from service.capture.session import EngineSlot
from service.capture.vllm_engine import VllmEngine, engine_arguments, sampling_parameters
from service.errors import EngineDied, EngineRefused
from service.settings import Settings
from tests.support.tiny_model import random_target


@pytest.mark.engine
def test_a_config_that_the_engine_stumbles_over_is_refused_by_name(tmp_path: Path):
    """vLLM 0.32 gives its extracting speculator a config that lacks DBRX's names for common keys."""
    config = DbrxConfig(d_model=64, n_heads=4, n_layers=2, vocab_size=512, max_seq_len=128)
    config.architectures = ["DbrxForCausalLM"]
    config.save_pretrained(tmp_path)
    spec = EngineSpec(tmp_path, "r", "float32", (1, 2), 64, 64, decode=False)
    with pytest.raises(
        EngineRefused, match=r"vLLM refuses .* AttributeError: .*num_attention_heads"
    ) as refused:
        asyncio.run(VllmEngine().start(spec, Settings(data_dir=tmp_path), EngineLink()))
    assert refused.value.field == "model"
    assert "architectures.md" in str(refused.value.cure)


@pytest.mark.engine
def test_batch_invariance_is_refused_by_name_where_runner_v2_would_not_start_and_is_no_jobs_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """vLLM says so once the model is loaded, as a failure of which memory may be the cause."""
    spec = EngineSpec(tmp_path, "r", "float32", (1, 2), 64, 64, decode=False)
    slot = EngineSlot(Settings(data_dir=tmp_path))
    monkeypatch.setattr(vllm_engine, "HAS_TRITON", True)
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    with pytest.raises(EngineDied, match="VLLM_BATCH_INVARIANT is set") as refused:
        asyncio.run(slot.start(None, spec, None))  # type: ignore[arg-type]
    assert refused.value.cure == "leave it unset"
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    with pytest.raises(EngineRefused, match="vLLM refuses"):  # the folder holds no model
        asyncio.run(slot.start(None, spec, None))  # type: ignore[arg-type]


@pytest.mark.engine
@pytest.mark.parametrize(
    ("engine", "length"),
    [("service.capture.vllm_engine:VllmEngine", 72), ("tests.support.fake_engine:FakeEngine", 90)],
)
def test_a_temporary_folder_whose_path_is_too_long_for_sockets_is_the_machines_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str, length: int
):
    """Such as a batch job's own: the engine's sockets could not be made, which failed the job."""
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        folder = Path(short, "x" * (length - len(short) - 1))
        folder.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        spec = EngineSpec(tmp_path, "r", "float32", (1, 2), 64, 64, decode=False)
        slot = EngineSlot(Settings(data_dir=tmp_path, engine=engine))
        with pytest.raises(EngineDied) as died:
            asyncio.run(slot.start(None, spec, None))  # type: ignore[arg-type]
        assert "TMPDIR" in str(died.value.cure)
        assert not list(folder.iterdir())


class OneGpu:
    """A node of NVIDIA's whose other GPUs are gone, for whoever counts them."""

    is_cuda = staticmethod(lambda: True)
    device_count = staticmethod(lambda: 1)

    def __getattr__(self, name: str) -> object:
        return getattr(platforms.current_platform, name)


@pytest.mark.engine
@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"engine_options": {"max_num_seqs": 0}}, "greater than or equal to 1"),
        ({"tensor_parallel_size": 2}, r"World size \(2\) is larger than the number of available GPUs"),
        ({"engine_options": {"max_num_seqs": 0}, "tensor_parallel_size": 2}, "vLLM refuses"),
    ],
    ids=["option", "lost GPU", "both"],
)
def test_what_vllm_refuses_of_a_workers_settings_is_no_jobs_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, object], says: str
):
    """A node that lost a GPU failed every job in the queue: each was refused as if by its model."""
    monkeypatch.setattr(parallel, "current_platform", OneGpu())
    target = random_target(tmp_path / "target", hidden=64, dtype="float32", max_position=128)
    spec = EngineSpec(target, "r", "float32", (1, 2), 64, 64, decode=False)
    slot = EngineSlot(Settings(data_dir=tmp_path, **settings))
    with pytest.raises(EngineDied, match=says) as died:
        asyncio.run(slot.start(None, spec, None))  # type: ignore[arg-type]
    names = " or ".join(f"QUARRY_{name.upper()}" for name in settings)
    assert died.value.cure == f"change {names}: without, vLLM takes the model"


@pytest.mark.engine
def test_what_vllm_refuses_of_a_model_whatever_the_settings_is_the_models(tmp_path: Path):
    """Its tokenizer is read behind a configuration that vLLM takes, with the worker's options or without."""
    target = random_target(tmp_path / "target", hidden=64, dtype="float32", max_position=128)
    (target / "tokenizer.json").write_text("{}")
    spec = EngineSpec(target, "r", "float32", (1, 2), 64, 64, decode=True)
    slot = EngineSlot(Settings(data_dir=tmp_path, engine_options={"max_num_seqs": 8}))
    with pytest.raises(EngineRefused, match="added_tokens") as refused:
        asyncio.run(slot.start(None, spec, None))  # type: ignore[arg-type]
    assert refused.value.field == "model"


def test_nested_options_are_told_apart_and_not_by_their_order():
    nested = {"seed": 1, "compilation_config": {"mode": 0, "custom_ops": ["none"]}}
    turned = {"compilation_config": {"custom_ops": ["none"], "mode": 0}, "seed": 1}
    other = {"seed": 1, "compilation_config": {"mode": 0, "custom_ops": ["all"]}}
    assert canonical_sha256(nested) == canonical_sha256(turned) != canonical_sha256(other)


def batch_tokens(layer_ids: tuple[int, ...], hidden_size: int, **options: object) -> int | None:
    spec = EngineSpec(Path("model"), "r", "bfloat16", layer_ids, hidden_size, 64, decode=False)
    return engine_arguments(spec, Settings(engine_options=options), EngineLink()).get(
        "max_num_batched_tokens"
    )


def test_a_step_holds_at_most_a_gibibyte_of_states_unless_the_operator_says_otherwise():
    """The engine's profile of its memory leaves out what stacks the captured states."""
    of_70b = {"layer_ids": tuple(range(81)), "hidden_size": 8192}
    assert batch_tokens(**of_70b) == 2**30 // (81 * 8192 * 2)
    assert batch_tokens(**of_70b, max_num_batched_tokens=2048) == 2048
    assert batch_tokens((2, 18, 33, 36), 4096) is None
    # On a CPU vLLM's default is 4,096 tokens, in this mode 8,192.
    wide = {"layer_ids": (2, 18, 33, 36), "hidden_size": 4 * 6400}
    assert batch_tokens(**wide) is None
    assert batch_tokens(**wide, performance_mode="throughput") == 2**30 // (4 * 4 * 6400 * 2)


def test_a_prompt_that_reads_no_cache_is_computed_whole():
    prompt = Prompt("name", (1, 2, 3), None)
    assert not sampling_parameters(prompt).skip_reading_prefix_cache
    assert sampling_parameters(replace(prompt, reads_cache=False)).skip_reading_prefix_cache
