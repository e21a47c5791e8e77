"""Our connector with a gather that reads as early as a device may: what the cache held when the step began.

On a device, copies run beside the step's own computation. On a CPU nothing runs beside it, so without this a
state that the step itself has still to write would be read right by luck.
"""

from collections.abc import Sequence
from unittest.mock import patch

import torch

from connector import hidden_states, worker
from connector.gather import Copy, CpuGather, Request


class EarlyGather:
    """Copies from a picture of the cache that is taken as the step begins."""

    def __init__(self, cache_BLSH: torch.Tensor) -> None:
        self._cache, self._picture = cache_BLSH, torch.full_like(cache_BLSH, float("nan"))
        self._gather = CpuGather(self._picture)

    def begin_step(self) -> None:
        self._picture.copy_(self._cache)

    def start(self, requests: Sequence[Request]) -> list[Copy]:
        return self._gather.start(requests)


class HiddenStatesConnector(hidden_states.HiddenStatesConnector):
    """Found by vLLM by this name. The test's own process imports it too, and keeps its own gather."""

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        with patch.object(worker, "gather_for", EarlyGather):
            super().register_kv_caches(kv_caches)
