"""Rehearses parts up to the first CUDA call, without a GPU: `python3.12 -m benchmarks.gpu.rehearse`.

Needs gcc, the package index and 8 GB of disk. A bare machine's packages are installed into a virtual
environment, what `benchmarks.gpu.carry` built is unpacked beside it, and libraries that stand in for the
driver name an H100. There the commands of the parts are run: their engines must fail at CUDA, and at nothing
before it.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.gpu.carry import CARRY, WHEELS
from benchmarks.gpu.unpack import unpack

BARE = (
    "torch==2.11.0",
    "torchvision==0.26.0",
    "torchaudio==2.11.0",
    "triton==3.6.0",
    "transformers==5.17.0",
    "huggingface_hub==1.33.0",
    "tokenizers==0.23.2",
    "safetensors==0.8.0",
    "numpy==2.5.2",
    *(
        "aiohttp",
        "anyio",
        "click",
        "cloudpickle",
        "einops",
        "h11",
        "httpx",
        "idna",
        "jinja2",
        "msgpack",
        "ninja",
    ),
    *(
        "numba",
        "nvidia-ml-py",
        "opencv-python-headless",
        "packaging",
        "pandas",
        "pillow",
        "prometheus-client",
    ),
    *(
        "protobuf",
        "psutil",
        "py-cpuinfo",
        "pyarrow==25.0.1",
        "python-dateutil",
        "pyyaml",
        "regex",
        "requests",
        "rich",
    ),
    *("scipy", "sentencepiece", "setuptools", "six", "tiktoken", "tqdm", "typer", "uvloop", "xxhash"),
)
"""What the machine has among what is imported."""

CUDA = ("cuInit", "cuCtxGetCurrent", "cuCtxSetCurrent", "cuDeviceGetAttribute", "cuDevicePrimaryCtxRetain")
CUDA += ("cuGetErrorString", "cuGetProcAddress_v2", "cuMemAddressFree", "cuMemAddressReserve", "cuMemCreate")
CUDA += ("cuMemGetAllocationGranularity", "cuMemMap", "cuMemRelease", "cuMemSetAccess", "cuMemUnmap")
CUDA += ("cuPointerGetAttribute", "cuTensorMapEncodeTiled", "cuDriverGetVersion")
"""What the carried libraries and torch look for in the driver; each answers that there is no device."""
NO_DEVICE = 100

NVML = """
#include <string.h>
typedef struct { unsigned long long total, free, used; } Memory;
int nvmlInit(void) { return 0; }
int nvmlInit_v2(void) { return 0; }
int nvmlInitWithFlags(unsigned flags) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlSystemGetDriverVersion(char *to, unsigned size) { strncpy(to, "580.0", size); return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 1; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned at, void **device) { *device = (void *)1; return at ? 2 : 0; }
int nvmlDeviceGetName(void *device, char *to, unsigned size) { strncpy(to, "NVIDIA H100", size); return 0; }
int nvmlDeviceGetUUID(void *device, char *to, unsigned size) { strncpy(to, "GPU-0", size); return 0; }
int nvmlDeviceGetCudaComputeCapability(void *device, int *major, int *minor) {
    *major = 9; *minor = 0; return 0;
}
int nvmlDeviceGetMemoryInfo(void *device, Memory *memory) {
    memory->total = memory->free = 85520809984ull; memory->used = 0; return 0;
}
"""
SMI = "#!/bin/sh\necho 'NVIDIA H100, 81559, 580.0, 5, 16'\n"

AT_CUDA = "Found no NVIDIA driver on your system"
"""What torch says at its first call of CUDA here."""
IN_ENGINE = "worker.init_device()"
PARTS = ("exact", "job")
LIMIT_S = 1200


def main() -> int:
    """Rehearse; return 1 if a part failed at something else than CUDA, and say at what."""
    parser = argparse.ArgumentParser(prog="python3.12 -m benchmarks.gpu.rehearse", description=__doc__)
    parser.add_argument("--from", dest="carry", type=Path, default=CARRY, help="default: .carry")
    parser.add_argument("--to", type=Path, default=Path(".cache/gpu/rehearsal"), help="everything goes there")
    options = parser.parse_args()
    if sys.version_info[:2] != (3, 12):
        parser.error(f"this is Python {sys.version_info.major}.{sys.version_info.minor}; 3.12 is needed")
    folder = options.to.resolve()
    python, site, driver = folder / "venv" / "bin" / "python", folder / "site", folder / "driver"
    if not python.exists():
        install(folder / "venv")
    make_driver(driver)
    unpack(options.carry, site)
    environment = os.environ | {
        "PYTHONPATH": str(site),
        "LD_LIBRARY_PATH": str(driver),
        "PATH": f"{driver}:{os.environ['PATH']}",
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    }
    where = [
        "--tiny",
        "--out",
        str(folder / "out"),
        "--folder",
        str(folder / "work"),
        "--limit-s",
        str(LIMIT_S),
    ]
    subprocess.run([python, "-m", "benchmarks.gpu", *PARTS, *where], env=environment)
    parts = json.loads((folder / "out" / "gpu.json").read_text())["parts"]
    log = (folder / "out" / "gpu.log").read_text(errors="replace")
    wrong = [part for part in PARTS if not ended_at_cuda(log.split(f"===== {part}\n")[-1].split("===== ")[0])]
    for part in PARTS:
        print(
            f"{part}: {'failed before CUDA' if part in wrong else 'reached CUDA'}, {parts[part]['seconds']} s"
        )
    return int(bool(wrong))


def ended_at_cuda(log: str) -> bool:
    """Say whether an engine's worker ended at its first call of CUDA."""
    return IN_ENGINE in log and AT_CUDA in log


def install(venv: Path) -> None:
    """Make the environment, without what is carried and came with something else."""
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    pip = [venv / "bin" / "python", "-m", "pip"]
    subprocess.run([*pip, "install", "--quiet", *BARE], check=True)
    subprocess.run([*pip, "uninstall", "--quiet", "--yes", *WHEELS], check=True)


def make_driver(folder: Path) -> None:
    """Compile the libraries that stand in for the driver."""
    folder.mkdir(parents=True, exist_ok=True)
    calls = "".join(f"int {name}(void) {{ return {NO_DEVICE}; }}\n" for name in CUDA)
    for library, source in (("libcuda.so.1", calls), ("libnvidia-ml.so.1", NVML)):
        command = ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", folder / library]
        subprocess.run(command, input=source, text=True, check=True)
    smi = folder / "nvidia-smi"
    smi.write_text(SMI)
    smi.chmod(0o755)


if __name__ == "__main__":
    sys.exit(main())
