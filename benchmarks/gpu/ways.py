"""The ways from the cache to the host that are compared. Each holds at most a pool's bytes in flight.

Legend: B blocks, L captured layers, S slots a block, H hidden size, T tokens of a request.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from benchmarks.gpu.cache import HIDDEN_SIZE, NUM_LAYERS, Request
from connector.cuda_gather import CudaGather
from connector.pool import HostPool
from connector.sums import Sums

POOL_BYTES = 2**30
"""The service's own default."""


@dataclass(frozen=True, slots=True)
class Flight:
    """A request under way.

    `states` are on the host once `done` says so, which never blocks. `end` lets go of the host memory.
    """

    request: Request
    states: torch.Tensor
    done: Callable[[], bool]
    end: Callable[[], None]
    sums: Callable[[], Sums] | None = None
    """Returns the sums [L, T] of the states where they were read."""


class Way(Protocol):
    """Brings requests to the host."""

    def start(self, requests: Sequence[Request]) -> list[Flight]:
        """Begin with the first of `requests`, as many as there is room for; return those."""


class QuarryWay:
    """The connector's gather into the connector's pool."""

    def __init__(self, cache_BLSH: torch.Tensor, pool: HostPool, stage_bytes: int) -> None:
        self._pool, self._gather = pool, CudaGather(cache_BLSH, stage_bytes)

    def start(self, requests: Sequence[Request]) -> list[Flight]:
        """Begin with requests as the worker half does."""
        started = []
        for request in requests:
            slab = self._pool.acquire(request.num_bytes)
            if slab is None:
                break
            shape_LTH = (NUM_LAYERS, request.num_tokens, HIDDEN_SIZE)
            started.append((request, slab, self._pool.tensor(slab, torch.bfloat16, shape_LTH)))
        self._gather.begin_step()
        copies = self._gather.start([(request.block_ids, out) for request, _, out in started])
        return [
            Flight(request, out, copy.done, partial(self._pool.release, slab), copy.sums)
            for (request, slab, out), copy in zip(started, copies, strict=True)
        ]


class PinnedWay:
    """Nothing but copies from one piece of device memory into the pool: what the link can carry."""

    def __init__(self, pool: HostPool, piece_bytes: int) -> None:
        """Take `piece_bytes`, the largest request, on the device."""
        self._pool, self._stream = pool, torch.cuda.Stream()
        self._piece = torch.zeros(piece_bytes, dtype=torch.uint8, device="cuda")

    def start(self, requests: Sequence[Request]) -> list[Flight]:
        """Copy as many bytes as `requests` have."""
        flights: list[Flight] = []
        for request in requests:
            slab = self._pool.acquire(request.num_bytes)
            if slab is None:
                break
            out = self._pool.tensor(slab, torch.uint8, (request.num_bytes,))
            with torch.cuda.stream(self._stream):
                out.copy_(self._piece[: request.num_bytes], non_blocking=True)
            copied = torch.cuda.Event()
            copied.record(self._stream)
            flights.append(Flight(request, out, copied.query, partial(self._pool.release, slab)))
        return flights
