"""The bounded host memory that every state passes through.

It is one buffer, allocated first fit and reused for the life of the engine.

A full pool creates back-pressure: the worker half leaves requests ungathered, their blocks stay held, and the
scheduler admits less. First fit keeps the low addresses warm; memory that is never touched is never paged in.
"""

import bisect
import mmap
import threading
import weakref
from dataclasses import dataclass

import torch

from schemas.dataset.memory import mapped

ALIGN_BYTES = 4096
"""Slabs begin on page boundaries, so that a layer can be handed to the kernel without a copy."""


@dataclass(frozen=True, slots=True)
class Slab:
    """A piece of the pool, owned by whoever holds it until `HostPool.release`."""

    offset: int
    num_bytes: int
    reserved_bytes: int


class HostPool:
    """Allocates slabs from one buffer of `num_bytes`; thread-safe.

    The buffer is pinned on CUDA machines and ordinary memory otherwise.
    """

    def __init__(self, num_bytes: int, *, pinned: bool) -> None:
        """Allocate the whole buffer now, so that a machine without the memory is refused at start.

        Raises MemoryError.
        """
        self.num_bytes = _aligned(num_bytes)
        try:
            # Mapped, since malloc's large allocations do not begin on a page boundary.
            memory = mapped(self.num_bytes)
            # After a fork, copy-on-write would move a page that the device still uses.
            memory.madvise(mmap.MADV_DONTFORK)
            self._buffer = torch.frombuffer(memory, dtype=torch.uint8)
            if pinned:
                self._pin()
        except (OSError, RuntimeError) as error:
            raise MemoryError(f"no {self.num_bytes} bytes for the host pool: {error}") from error
        self._lock = threading.Lock()
        self._free: list[tuple[int, int]] = [(0, self.num_bytes)]
        """(offset, bytes) of each free piece, sorted by offset, never adjacent."""

    def _pin(self) -> None:
        """Page-lock the buffer for the device until the pool is garbage-collected.

        torch would round pinned memory up to a power of two: up to twice the size.
        """
        runtime = torch.cuda.cudart()
        address = self._buffer.data_ptr()
        torch.cuda.check_error(runtime.cudaHostRegister(address, self.num_bytes, 0))
        # The end of the process unlocks the pages anyway, and the CUDA context may be gone by then.
        weakref.finalize(self, runtime.cudaHostUnregister, address).atexit = False

    def acquire(self, num_bytes: int) -> Slab | None:
        """Return a slab of `num_bytes`, or None while the pool is too full.

        Raises ValueError if it can never fit.
        """
        want = _aligned(num_bytes)
        if want > self.num_bytes:
            raise ValueError(f"{num_bytes} bytes do not fit a pool of {self.num_bytes}")
        with self._lock:
            for index, (offset, size) in enumerate(self._free):
                if size >= want:
                    if size == want:
                        del self._free[index]
                    else:
                        self._free[index] = (offset + want, size - want)
                    return Slab(offset, num_bytes, want)
        return None

    def release(self, slab: Slab) -> None:
        """Give a slab back; its bytes may be overwritten from now on."""
        begin, end = slab.offset, slab.offset + slab.reserved_bytes
        with self._lock:
            index = bisect.bisect_left(self._free, (begin, 0))
            if index < len(self._free) and self._free[index][0] == end:
                end += self._free.pop(index)[1]
            if index and sum(self._free[index - 1]) == begin:
                begin = self._free.pop(index - 1)[0]
                index -= 1
            self._free.insert(index, (begin, end - begin))

    @property
    def used_bytes(self) -> int:
        """How much of the buffer is allocated to slabs."""
        with self._lock:
            return self.num_bytes - sum(size for _, size in self._free)

    def tensor(self, slab: Slab, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """Return the slab's bytes as a contiguous tensor of `dtype` and `shape`; no copy."""
        return self._buffer[slab.offset : slab.offset + slab.num_bytes].view(dtype).view(shape)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES
