"""Checks the machine: cores, memory, shared memory, and the data folder's disk."""

import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np

from schemas.dataset.direct import DirectWriter
from schemas.dataset.memory import page_aligned
from schemas.request import Storage
from service.doctor.check_result import CheckResult, Verdict, at_least
from service.settings import Settings

GIB, GB = 2**30, 1e9
STATES_GB_S, CORES_A_GB_S = 1.0, 1.4
"""The maximum output of an 8B target on one GPU, and the cores that write and verify 1 GB/s:
docs/sizing.md.
"""
SHARED_BYTES = 2**30
"""Shared memory for vLLM's queues between processes, and for NCCL if a model is split; Docker's default is 64
MiB.
"""
PROBE_BYTES, PROBE_BLOCK_BYTES, PROBE_S = 2**28, 2**23, 5.0


def cores(settings: Settings, num_gpus: int) -> Iterator[CheckResult]:
    """Check the number of cores: a worker takes one, its engine core one, each GPU one plus its writers."""
    here = min(len(os.sched_getaffinity(0)), quota())
    workers = -(-num_gpus // settings.tensor_parallel_size)
    wanted = 2 * workers + (1 + CORES_A_GB_S * STATES_GB_S) * num_gpus
    cure = "give the container or the batch job more: GPUs wait while states are written"
    detail = f"{here:g} to use" + (f"; what the GPUs need keeps up to {wanted:.1f} busy" if num_gpus else "")
    yield CheckResult("cores", at_least(here, wanted), detail, cure)


def quota(groups: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> float:
    """Return the cores that this process's cgroup and its parents allow; infinity if unlimited."""
    least = float("inf")
    of_process = membership.read_text() if membership.exists() else ""  # a kernel may have no cgroups
    for path in re.findall(r"^0::/(.*)$", of_process, re.MULTILINE):
        for group in (groups / path, *(groups / path).parents):
            with suppress(FileNotFoundError, ValueError):  # no such file at the root; may be "max"
                allowed, period = (group / "cpu.max").read_text().split()
                least = min(least, int(allowed) / int(period))
    return least


def memory(settings: Settings, num_gpus: int) -> Iterator[CheckResult]:
    """Compare the available memory with the workers' host pools and the memory for planning."""
    from service.memory import available_bytes

    free, size = available_bytes(), settings.tensor_parallel_size
    wanted = settings.pool_bytes * max(num_gpus, size) + settings.planners * settings.plan_memory_bytes
    detail = f"{free / GIB:.1f} GiB to take; pools and planning take {wanted / GIB:.1f} GiB"
    cure = "give the container more, or lower QUARRY_POOL_BYTES or QUARRY_PLANNERS"
    yield CheckResult("memory", at_least(free, wanted, settings.pool_bytes * size), detail, cure)


def shared_memory(settings: Settings, folder: Path = Path("/dev/shm")) -> Iterator[CheckResult]:  # noqa: S108
    """Check the shared memory for the engine's processes."""
    free = shutil.disk_usage(folder).free
    needed = SHARED_BYTES if settings.tensor_parallel_size > 1 else 0
    detail = f"{free / GIB:.2f} GiB free in {folder}, an engine may take {SHARED_BYTES / GIB:g} GiB"
    cure = "start the container with --ipc=host or --shm-size=16g"
    yield CheckResult("shared memory", at_least(free, SHARED_BYTES, needed), detail, cure)


def disk(settings: Settings, num_gpus: int) -> Iterator[CheckResult]:
    """Check the data folder's disk: its free space, and its speed by writing to it. Raises OSError."""
    whole = settings.data_dir.absolute()
    folder = next(place for place in (whole, *whole.parents) if place.exists())
    free, reserved = shutil.disk_usage(folder).free, settings.min_free_bytes
    units = settings.units_in_flight + settings.units_in_proof
    waiting = settings.scratch_bytes or Storage().shard_bytes * units
    detail = f"{free / GB:.1f} GB free at {folder}; {waiting / GB:.1f} GB may wait there beside "
    detail += f"the {reserved / GB:.1f} GB of QUARRY_MIN_FREE_BYTES"
    cure = "free space, name a larger disk in QUARRY_DATA_DIR, or lower QUARRY_SCRATCH_BYTES"
    yield CheckResult("disk room", at_least(free, waiting + reserved, reserved), detail, cure)
    if free < reserved + PROBE_BYTES:
        detail = f"no room to write {PROBE_BYTES / GB:.1f} GB beside QUARRY_MIN_FREE_BYTES"
        yield CheckResult("disk speed", Verdict.UNSEEN, detail, "free space")
        return
    rate, wanted = written_gb_s(folder), STATES_GB_S * max(1, num_gpus)
    detail = f"{rate:.2f} GB/s written and synced; an 8B target makes up to {STATES_GB_S:g} GB/s on each GPU"
    cure = "GPUs wait for a slow disk: take NVMe, or store fewer layers (docs/sizing.md)"
    yield CheckResult("disk speed", at_least(rate, wanted, wanted / 10), detail, cure)


def written_gb_s(folder: Path, num_bytes: int = PROBE_BYTES) -> float:
    """Write to an unnamed temporary file as the drain does, for at most `PROBE_S`. Raises OSError."""
    block = page_aligned(PROBE_BLOCK_BYTES)
    block[:] = np.frombuffer(os.urandom(PROBE_BLOCK_BYTES), np.uint8)  # a disk may compress zeros
    with tempfile.TemporaryFile(dir=folder) as nameless:
        began_s, writer = time.monotonic(), DirectWriter(Path(f"/proc/self/fd/{nameless.fileno()}"))
        while writer.position < num_bytes and time.monotonic() - began_s < PROBE_S:
            writer.write(block.data)
        writer.end()
        os.fsync(nameless.fileno())
        return writer.position / (time.monotonic() - began_s) / GB
