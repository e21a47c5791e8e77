"""The memory that may still be taken is the host's, or less where a control group bounds the process."""

from pathlib import Path

import psutil
import pytest

from service.memory import available_bytes

GIB = 2**30


def group(folder: Path, limit: str, used: int, cached: int = 0, *, version: int = 2) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = (
        ("memory.max", "memory.current")
        if version == 2
        else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    )
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    cache = "inactive_file" if version == 2 else "total_inactive_file"
    (folder / "memory.stat").write_text(f"anon {used - cached}\n{cache} {cached}\n")


def available(tmp_path: Path, membership: str) -> int:
    (tmp_path / "cgroup").write_text(membership)
    return available_bytes(tmp_path / "mount", tmp_path / "cgroup")


def test_the_tightest_group_above_the_process_counts_and_its_cache_is_free(tmp_path: Path) -> None:
    mount = tmp_path / "mount"
    group(mount / "a" / "b", str(GIB), 3 * GIB // 4, GIB // 4)
    assert available(tmp_path, "0::/a/b\n") == GIB // 2
    group(mount / "a", str(GIB // 2), GIB // 4)
    assert available(tmp_path, "0::/a/b\n") == GIB // 4
    group(mount / "a", str(GIB // 2), GIB)
    assert available(tmp_path, "0::/a/b\n") == 0


@pytest.mark.parametrize(
    "membership", ["0::/\n", "0::/docker/of-the-host\n", "0::/../../slice/of-the-host\n"]
)
def test_in_a_container_the_groups_folder_is_its_own(tmp_path: Path, membership: str) -> None:
    group(tmp_path / "mount", str(GIB), GIB // 2)
    assert available(tmp_path, membership) == GIB // 2


def test_groups_of_version_1_count_too(tmp_path: Path) -> None:
    group(tmp_path / "mount" / "memory" / "slurm", str(GIB), GIB // 2, GIB // 4, version=1)
    assert available(tmp_path, "5:cpu,cpuacct:/slurm\n4:memory:/slurm\n") == 3 * GIB // 4


@pytest.mark.parametrize("limit", ["max", str(2**62)])
def test_without_a_limit_the_host_counts(tmp_path: Path, limit: str) -> None:
    group(tmp_path / "mount" / "a", limit, 0)
    assert 0 < available(tmp_path, "0::/a\n") < psutil.virtual_memory().total
    assert 0 < available_bytes(tmp_path, tmp_path / "none") < psutil.virtual_memory().total
