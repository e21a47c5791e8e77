"""The machine that the tests run on, and control groups and mounts as other machines show them."""

import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from service.doctor import machine
from service.doctor.check_result import CheckResult, Verdict, at_least
from service.doctor.examination import judged
from service.memory import available_bytes
from service.settings import Settings

GOOD, DOUBTFUL, BAD, UNSEEN = Verdict
TIB = 2**40


def verdict(results: Iterator[CheckResult]) -> Verdict:
    (found,) = results
    return found.verdict


@pytest.mark.parametrize(
    ("value", "expected"), [(0.0, BAD), (0.9, BAD), (1.0, DOUBTFUL), (1.9, DOUBTFUL), (2.0, GOOD)]
)
def test_a_value_is_good_from_what_is_wanted_on_and_bad_below_what_is_needed(value, expected):
    assert at_least(value, 2.0, 1.0) is expected


@pytest.mark.parametrize(
    ("groups", "membership", "cores"),
    [
        ({"a": "400000 100000", "a/b": "max 100000"}, "0::/a/b\n", 4.0),
        ({"a": "400000 100000", "a/b": "150000 100000"}, "0::/a/b\n", 1.5),
        ({".": "250000 100000"}, "0::/\n", 2.5),
        ({".": "250000 100000"}, "0::/of/the/host\n", 2.5),
        ({"a": "100000 100000"}, "4:memory:/a\n0::/\n", float("inf")),
        ({}, "", float("inf")),
    ],
)
def test_the_tightest_group_above_the_process_bounds_its_cores(tmp_path, groups, membership, cores):
    for name, text in groups.items():
        (tmp_path / "mount" / name).mkdir(parents=True, exist_ok=True)
        (tmp_path / "mount" / name / "cpu.max").write_text(f"{text}\n")
    (tmp_path / "membership").write_text(membership)
    assert machine.quota(tmp_path / "mount", tmp_path / "membership") == cores


def test_a_kernel_without_groups_bounds_no_cores(tmp_path):
    assert machine.quota(tmp_path, tmp_path / "missing") == float("inf")


def test_cores_are_those_of_the_process_and_enough_without_a_gpu(monkeypatch):
    (found,) = machine.cores(Settings(), 0)
    assert found.verdict is GOOD
    assert 0 < float(found.detail.partition(" ")[0]) <= len(os.sched_getaffinity(0))
    monkeypatch.setattr(machine, "quota", lambda: 0.5)
    (found,) = machine.cores(Settings(), 0)
    assert found.detail == "0.5 to use"


@pytest.mark.parametrize(
    ("num_gpus", "size", "wanted"), [(1, 1, 4.4), (8, 1, 35.2), (8, 8, 21.2), (2, 4, 6.8)]
)
def test_each_worker_and_each_gpu_needs_cores(monkeypatch, num_gpus, size, wanted):
    settings = Settings(tensor_parallel_size=size)
    for here, expected in ((wanted + 0.01, GOOD), (wanted - 0.01, DOUBTFUL)):
        monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _: range(64))
        monkeypatch.setattr(machine, "quota", lambda here=here: here)
        assert verdict(machine.cores(settings, num_gpus)) is expected


@pytest.mark.parametrize(
    ("num_gpus", "settings", "expected"),
    [
        (0, {"pool_bytes": 2**20, "plan_memory_bytes": 2**24}, GOOD),
        (0, {"pool_bytes": TIB * 64}, BAD),
        (0, {"pool_bytes": 2**20, "plan_memory_bytes": TIB * 64}, DOUBTFUL),
        (2**30, {"pool_bytes": 2**20, "plan_memory_bytes": 2**24}, DOUBTFUL),
        (0, {"pool_bytes": available_bytes() // 2, "tensor_parallel_size": 4}, BAD),
    ],
)
def test_memory_must_hold_a_workers_pools_and_should_hold_all_and_planning(num_gpus, settings, expected):
    assert verdict(machine.memory(Settings(**settings), num_gpus)) is expected


@pytest.mark.parametrize(
    ("size", "wanted", "expected"), [(2, 1, GOOD), (1, TIB * 2**20, DOUBTFUL), (2, TIB * 2**20, BAD)]
)
def test_little_shared_memory_is_bad_where_a_model_is_split(tmp_path, monkeypatch, size, wanted, expected):
    monkeypatch.setattr(machine, "SHARED_BYTES", wanted)
    assert verdict(machine.shared_memory(Settings(tensor_parallel_size=size), tmp_path)) is expected


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "PROBE_S", 0.01)


def looked(settings: Settings, num_gpus: int = 0) -> dict[str, Verdict]:
    return {one.what: one.verdict for one in judged("disk", lambda: machine.disk(settings, num_gpus))}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"min_free_bytes": 0, "scratch_bytes": 2**20}, GOOD),
        ({"min_free_bytes": 0, "scratch_bytes": 2**62}, DOUBTFUL),
        ({"min_free_bytes": 2**62}, BAD),
        ({"min_free_bytes": 0, "units_in_flight": 1, "units_in_proof": 0}, GOOD),
    ],
)
@pytest.mark.usefixtures("brief")
def test_the_disk_has_room_for_what_waits_and_nothing_is_left_on_it(tmp_path, settings, expected):
    assert looked(Settings(data_dir=tmp_path / "a" / "b", **settings))["disk room"] is expected
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("free", "expected"), [(5 * 2**31 + 5, GOOD), (5 * 2**31 + 4, DOUBTFUL), (5, DOUBTFUL), (4, BAD)]
)
@pytest.mark.usefixtures("brief")
def test_without_a_bound_the_units_in_flight_and_in_proof_wait(tmp_path, monkeypatch, free, expected):
    usage = machine.shutil.disk_usage(tmp_path)._replace(free=free)
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda _: usage)
    settings = Settings(data_dir=tmp_path, min_free_bytes=5, units_in_flight=2, units_in_proof=3)
    assert looked(settings)["disk room"] is expected


@pytest.mark.parametrize(
    ("rate", "num_gpus", "expected"), [(1e-9, 0, GOOD), (1e9, 0, BAD), (1e-9, 2**60, BAD)]
)
@pytest.mark.usefixtures("brief")
def test_a_disk_is_held_against_what_the_gpus_make(tmp_path, monkeypatch, rate, num_gpus, expected):
    monkeypatch.setattr(machine, "STATES_GB_S", rate)
    assert looked(Settings(data_dir=tmp_path), num_gpus)["disk speed"] is expected


def test_a_write_that_fails_is_a_result_and_leaves_nothing(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, hard))
    try:
        found = looked(Settings(data_dir=tmp_path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert found["disk"] is BAD
    assert list(tmp_path.iterdir()) == []


def test_a_data_folder_below_a_file_is_bad(tmp_path):
    (tmp_path / "file").write_text("")
    assert looked(Settings(data_dir=tmp_path / "file" / "data"))["disk"] is BAD


def test_the_bytes_are_bounded_and_have_no_name_while_they_are_there(tmp_path, monkeypatch):
    seen: list[tuple[int, list[Path]]] = []
    monkeypatch.setattr(machine.os, "fsync", lambda fd: seen.append((os.fstat(fd).st_size, listed())))

    def listed() -> list[Path]:
        return list(tmp_path.iterdir())

    machine.written_gb_s(tmp_path, num_bytes=2**24)
    assert seen == [(2**24, [])]


@pytest.mark.parametrize(("beside", "expected"), [(-1, UNSEEN), (0, GOOD)])
@pytest.mark.usefixtures("brief")
def test_nothing_is_written_where_there_is_no_room_for_it(tmp_path, monkeypatch, beside, expected):
    usage = machine.shutil.disk_usage(tmp_path)._replace(free=5 + machine.PROBE_BYTES + beside)
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda _: usage)
    monkeypatch.setattr(machine, "STATES_GB_S", 1e-9)
    assert looked(Settings(data_dir=tmp_path, min_free_bytes=5))["disk speed"] is expected
