"""vLLM's CPU build without its rule that processes are spawned: as on CUDA, the environment decides."""

import os
from typing import Any

from vllm.platforms.cpu import CpuPlatform

from service.capture.vllm_engine import VllmEngine as UnforcedEngine

__all__ = ["UnforcedEngine"]

METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
forcing = CpuPlatform.check_and_update_config


def unforced(vllm_config: Any) -> None:
    """Let the platform adapt the config, and take back what it says of the start method."""
    said = os.environ.pop(METHOD, None)
    forcing(vllm_config)
    del os.environ[METHOD]
    if said is not None:
        os.environ[METHOD] = said


CpuPlatform.check_and_update_config = staticmethod(unforced)
