"""The ways from the cache to the host that are compared. Each holds at most a pool's bytes in flight.

Legend: B blocks, L captured layers, S slots a block, H hidden size, T tokens of a request.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import torch

from benchmarks.gpu_cache import HIDDEN_SIZE, NUM_LAYERS, Request
from connector.cuda_gather import CudaGather
from connector.gather import Copy
from connector.pool import HostPool, Slab
from connector.sums import Sums

POOL_BYTES = 2**30
"""The service's own default."""

EXAMPLE_THREADS = 8
"""The example connector's own number of writer threads."""


class Flight(Protocol):
    """A request under way."""

    request: Request

    def done(self) -> bool:
        """Say whether all its states are on the host; never blocks."""

    def states_LTH(self) -> torch.Tensor:
        """Return the states on the host, once done."""

    def end(self) -> None:
        """Let go of the host memory, or hand it on."""


class Way(Protocol):
    """Brings requests to the host."""

    def start(self, requests: Sequence[Request]) -> Sequence[Flight]:
        """Begin with the first of `requests`, as many as there is room for; return those."""


class SlabFlight:
    """A request on its way into a slab of the pool."""

    def __init__(
        self,
        request: Request,
        slab: Slab,
        states_LTH: torch.Tensor,
        copy: Copy,
        on_end: Callable[["SlabFlight"], None],
    ) -> None:
        self.request, self.slab = request, slab
        self._states_LTH, self._copy, self._on_end = states_LTH, copy, on_end

    def done(self) -> bool:
        """Ask the copy."""
        return self._copy.done()

    def states_LTH(self) -> torch.Tensor:
        """Return the slab."""
        return self._states_LTH

    def sums_LT(self) -> Sums:
        """Return the sums of the states where they were read."""
        return self._copy.sums()

    def end(self) -> None:
        """Release the slab, or give it to whoever asked for it."""
        self._on_end(self)


class QuarryWay:
    """The connector's gather into the connector's pool."""

    def __init__(self, cache_BLSH: torch.Tensor, pool: HostPool, stage_bytes: int) -> None:
        """Read from `cache_BLSH`; `on_end` is called with every flight that ended and owns its slab."""
        self._pool, self._gather = pool, CudaGather(cache_BLSH, stage_bytes)
        self.on_end: Callable[[SlabFlight], None] = lambda flight: pool.release(flight.slab)

    def start(self, requests: Sequence[Request]) -> list[SlabFlight]:
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
            SlabFlight(request, slab, out, copy, self.on_end)
            for (request, slab, out), copy in zip(started, copies, strict=True)
        ]


class PinnedWay:
    """Nothing but copies from one piece of device memory into the pool: what the link can carry."""

    def __init__(self, pool: HostPool, piece_bytes: int) -> None:
        """Take `piece_bytes`, the largest request, on the device."""
        self._pool, self._stream = pool, torch.cuda.Stream()
        self._piece = torch.zeros(piece_bytes, dtype=torch.uint8, device="cuda")

    def start(self, requests: Sequence[Request]) -> list[SlabFlight]:
        """Copy as many bytes as `requests` have."""
        flights = []
        for request in requests:
            slab = self._pool.acquire(request.num_bytes)
            if slab is None:
                break
            out = self._pool.tensor(slab, torch.uint8, (request.num_bytes,))
            with torch.cuda.stream(self._stream):
                out.copy_(self._piece[: request.num_bytes], non_blocking=True)
            flights.append(SlabFlight(request, slab, out, _Copied(self._stream), self._release))
        return flights

    def _release(self, flight: SlabFlight) -> None:
        self._pool.release(flight.slab)


class ExampleWay:
    """What vLLM's example connector does for a finished request, in the same order of the same steps.

    That is: an index of every slot, made on the host and sent from memory that is not pinned; a gather by
    token into new device memory; a copy into new pinned memory from torch's allocator; with a `folder`, a
    thread that waits for the copy and writes a safetensors file, not durable.
    """

    def __init__(self, cache_BLSH: torch.Tensor, folder: Path | None) -> None:
        """Read from `cache_BLSH`; write to `folder` if there is one."""
        self._cache, self._folder = cache_BLSH, folder
        self._stream = torch.cuda.Stream()
        self._writers = ThreadPoolExecutor(EXAMPLE_THREADS)
        self._in_flight_bytes = self._num_files = 0
        self.writes: list[Future[None]] = []

    def start(self, requests: Sequence[Request]) -> "list[ExampleFlight]":
        """Begin with requests, one after the other."""
        flights: list[ExampleFlight] = []
        for request in requests:
            if self._in_flight_bytes and self._in_flight_bytes + request.num_bytes > POOL_BYTES:
                break
            flights.append(self._start(request))
        return flights

    def _start(self, request: Request) -> "ExampleFlight":
        """Begin with a request as the example's `get_finished` does."""
        num_slots = self._cache.shape[2]
        blocks = torch.tensor(request.block_ids, dtype=torch.long)
        slots = (torch.arange(num_slots)[None] + blocks[:, None] * num_slots).flatten()
        ready = torch.cuda.Event()
        ready.record()
        self._stream.wait_event(ready)
        with torch.cuda.stream(self._stream):
            slots = slots.to("cuda", non_blocking=True)
            states_TLH = self._cache[slots // num_slots, :, slots % num_slots][: request.num_tokens]
            pinned_TLH = torch.empty_like(states_TLH, device="cpu", pin_memory=True)
            pinned_TLH.copy_(states_TLH, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record(self._stream)
        if self._folder is not None:
            path = self._folder / f"{self._num_files}.safetensors"
            self._num_files += 1
            self.writes.append(self._writers.submit(_save, pinned_TLH, request.num_tokens, copied, path))
        self._in_flight_bytes += request.num_bytes
        return ExampleFlight(request, pinned_TLH, copied, self._ended)

    def _ended(self, flight: "ExampleFlight") -> None:
        self._in_flight_bytes -= flight.request.num_bytes


class ExampleFlight:
    """A request on its way into pinned memory of its own."""

    def __init__(
        self,
        request: Request,
        pinned_TLH: torch.Tensor,
        copied: torch.cuda.Event,
        on_end: Callable[["ExampleFlight"], None],
    ) -> None:
        self.request = request
        self._pinned_TLH, self._copied, self._on_end = pinned_TLH, copied, on_end

    def done(self) -> bool:
        """Ask the event behind the copy."""
        return bool(self._copied.query())

    def states_LTH(self) -> torch.Tensor:
        """Return a view with the layers in front."""
        return self._pinned_TLH.transpose(0, 1)

    def end(self) -> None:
        """Count its bytes as landed; the memory goes with the last who refers to it."""
        self._on_end(self)


class _Copied:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = torch.cuda.Event()
        self._event.record(stream)

    def done(self) -> bool:
        return bool(self._event.query())


def _save(pinned_TLH: torch.Tensor, num_tokens: int, copied: torch.cuda.Event, path: Path) -> None:
    from safetensors.torch import save_file

    copied.synchronize()
    save_file({"hidden_states": pinned_TLH, "token_ids": torch.zeros(num_tokens, dtype=torch.long)}, path)
