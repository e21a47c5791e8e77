"""Which GPUs and cores each worker of a node gets."""

from pathlib import Path

import pytest

from service.errors import OptionRefused
from service.work import placement as module
from service.work.placement import EVERYWHERE, Gpu, Placement, placements

FIRST, SECOND = frozenset(range(8)), frozenset(range(8, 16))
EIGHT = [Gpu(str(n), FIRST if n in {0, 2, 4, 6} else SECOND) for n in range(8)]
"""GPUs of two NUMA nodes, listed in turn."""


def two_a_node() -> list[Gpu]:
    return EIGHT


def none() -> list[Gpu]:
    return []


def test_auto_makes_a_worker_for_each_group_of_gpus_of_one_node():
    assert placements("auto", 2, two_a_node) == [
        Placement(("0", "2"), frozenset(range(4, 8))),
        Placement(("4", "6"), frozenset(range(4))),
        Placement(("1", "3"), frozenset(range(12, 16))),
        Placement(("5", "7"), frozenset(range(8, 12))),
    ]


def test_every_gpu_and_core_is_of_one_worker():
    placed = placements("8", 1, two_a_node)
    assert sorted(gpu for one in placed for gpu in one.gpus or ()) == [str(n) for n in range(8)]
    assert sorted(core for one in placed for core in one.cores or ()) == list(range(16))


def test_cores_of_a_node_that_is_not_known_are_not_divided():
    assert placements("2", 1, lambda: [Gpu("0"), Gpu("1")]) == [Placement(("0",)), Placement(("1",))]


@pytest.mark.parametrize("workers", ["1", "auto"])
def test_without_gpus_one_worker_has_everything(workers: str):
    assert placements(workers, 1, none) == [EVERYWHERE]


def test_one_worker_asks_for_no_gpus():
    def fails() -> list[Gpu]:
        raise AssertionError

    assert placements("1", 4, fails) == [EVERYWHERE]


@pytest.mark.parametrize("workers", ["0", "-1", "many", "5", "9"])
def test_a_number_that_cannot_be_is_refused_by_name(workers: str):
    with pytest.raises(OptionRefused) as refused:
        placements(workers, 2, two_a_node)
    assert refused.value.field == "workers"


def test_fewer_gpus_than_one_worker_needs_are_refused():
    with pytest.raises(OptionRefused, match="8 GPUs are here, 16 are needed"):
        placements("auto", 16, two_a_node)


def test_a_worker_sees_its_gpus_alone():
    assert Placement(("2", "3")).environment()["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert EVERYWHERE.environment() == {}


TWO = ("0, GPU-a, 00000000:3B:00.0, NVIDIA H100", "1, GPU-b, 00000000:D8:00.0, NVIDIA H100")


def list_gpus(folder: Path, monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    """Put a stand-in for nvidia-smi in the path, which prints what that prints."""
    listing = folder / "nvidia-smi"
    listing.write_text("#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in lines))
    listing.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    for name in (module.VISIBLE, module.ORDER):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("shown", "names"),
    [
        (None, ["0", "1"]),
        ("1", ["1"]),
        ("GPU-b,GPU-a", ["1", "0"]),
        ("MIG-c", ["MIG-c"]),
        ("", []),
        ("NoDevFiles", []),
        ("1,-1,0", ["1"]),
    ],
)
def test_gpus_are_those_that_the_operator_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shown: str | None, names: list[str]
):
    """The kernel's folder is one of the same form."""
    list_gpus(tmp_path, monkeypatch, *TWO)
    near = tmp_path / "0000:3b:00.0"
    near.mkdir()
    (near / "local_cpulist").write_text("0-1,4096\n")
    monkeypatch.setattr(module, "PCI_DEVICES", tmp_path)
    if shown is not None:
        monkeypatch.setenv(module.VISIBLE, shown)
    found = module.visible_gpus()
    assert [gpu.name for gpu in found] == names
    assert {gpu.name: gpu.cores for gpu in found}.get("0", frozenset({0, 1})) == {0, 1}


def test_without_nvidia_smi_there_are_no_gpus_but_those_that_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv(module.VISIBLE, raising=False)
    assert module.visible_gpus() == []
    monkeypatch.setenv(module.VISIBLE, "MIG-1,MIG-2")
    assert module.visible_gpus() == [Gpu("MIG-1"), Gpu("MIG-2")]


@pytest.mark.parametrize("line", ["No devices were found", "Unable to determine the device handle for GPU0"])
def test_what_nvidia_smi_says_in_words_is_a_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str
):
    list_gpus(tmp_path, monkeypatch, line)
    with pytest.raises(OptionRefused, match="nvidia-smi fails") as refused:
        module.visible_gpus()
    assert refused.value.field == "workers"


@pytest.mark.parametrize("shown", ["0,0", "0, 0", "GPU-a,0", "GPU-cde,GPU-c", "MIG-c,MIG-c"])
def test_a_gpu_that_is_shown_twice_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shown: str
):
    list_gpus(tmp_path, monkeypatch, *TWO, "2, GPU-cde, 00000000:D9:00.0, NVIDIA H100")
    monkeypatch.setenv(module.VISIBLE, shown)
    with pytest.raises(OptionRefused, match="names a GPU twice") as refused:
        module.visible_gpus()
    assert refused.value.field == "CUDA_VISIBLE_DEVICES"


def test_numbers_of_gpus_of_several_models_are_refused_unless_they_are_counted_by_the_bus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    list_gpus(tmp_path, monkeypatch, TWO[0], TWO[1].replace("H100", "L4"))
    monkeypatch.setenv(module.VISIBLE, "1")
    with pytest.raises(OptionRefused, match="GPUs of several models") as refused:
        module.visible_gpus()
    assert refused.value.field == "CUDA_VISIBLE_DEVICES"
    monkeypatch.setenv(module.ORDER, "PCI_BUS_ID")
    assert [gpu.name for gpu in module.visible_gpus()] == ["1"]
    monkeypatch.delenv(module.ORDER)
    monkeypatch.setenv(module.VISIBLE, "GPU-b")
    assert [gpu.name for gpu in module.visible_gpus()] == ["1"]
    monkeypatch.delenv(module.VISIBLE)
    assert [gpu.name for gpu in module.visible_gpus()] == ["0", "1"]
