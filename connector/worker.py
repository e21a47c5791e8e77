"""The worker half: copies finished requests from the cache into the host pool, for the writers.

Runs in the engine's worker process; `step` runs on its step thread, message handling on the link's thread.
When the pool is full, requests wait ungathered with their blocks held; nothing else is meant to slow the
engine down.

Legend: B blocks, L captured layers, S slots per block, H hidden size, T tokens.
"""

from collections import deque
from collections.abc import Callable

import torch

from connector.cuda_gather import CudaGather
from connector.gather import Copy, CpuGather
from connector.link import Link
from connector.pool import HostPool, Slab
from connector.repeats import RepeatCheck
from connector.sentinels import Sentinels
from connector.wire import DrainConfig, DrainJob, RowRef, StepWork, VoidRow
from connector.writers import CapturedRow, WriterPool
from schemas.receipts import AskLoad, Hello, RankLoad, ToConnector


def gather_for(cache_BLSH: torch.Tensor) -> CpuGather | CudaGather:
    """Return the gather for the cache's device."""
    return CudaGather(cache_BLSH) if cache_BLSH.is_cuda else CpuGather(cache_BLSH)


def device_name(device: torch.device) -> str:
    """Return the GPU's model, such as `NVIDIA H200`, since other models round differently; else `cpu`."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


class WorkerHalf:
    """Owns the pool, the gather, the writers and the link of one rank."""

    def __init__(
        self,
        config: DrainConfig,
        cache_BLSH: torch.Tensor,
        max_tokens: int,
        on_lost: Callable[[], None],
    ) -> None:
        """Connect to the service and describe this rank.

        The pool holds at least one request of `max_tokens`.

        Raises OSError if the service is not listening, MemoryError if there is no memory for the pool.
        """
        num_blocks, num_layers, num_slots, hidden_size = cache_BLSH.shape
        self._shape_LH = (num_layers, hidden_size)
        self._dtype = cache_BLSH.dtype
        self._rank, self._num_ranks = config.rank, config.num_ranks
        self._row_bytes_per_token = num_layers * hidden_size * cache_BLSH.element_size()
        pool_bytes = max(config.pool_bytes, max_tokens * self._row_bytes_per_token)
        self._pool = HostPool(pool_bytes, pinned=cache_BLSH.is_cuda)
        self._gather = gather_for(cache_BLSH)
        self._sentinels = Sentinels(cache_BLSH)
        self._null_block_LSH = cache_BLSH[0]
        self._waiting: deque[DrainJob] = deque()
        self._copying: deque[tuple[Copy, DrainJob, Slab, torch.Tensor]] = deque()
        self._drained_rows = self._drained_tokens = 0
        self._num_writers = config.writer_threads
        self._link = Link(config.socket_path, self._on_message, on_lost)
        repeats = RepeatCheck(num_layers, num_blocks * num_slots)
        self._writers = WriterPool(config, self._pool, self._link.send, repeats)
        self._link.start()
        self._link.send(
            Hello(
                rank=config.rank,
                num_ranks=config.num_ranks,
                engine_version=config.engine_version,
                device=device_name(cache_BLSH.device),
                cache_shape=(num_blocks, num_layers, num_slots, hidden_size),
            )
        )

    def begin(self, work: StepWork) -> None:
        """Clear block 0 and place sentinels in the step's fresh blocks, before the engine computes into them.

        Called on the engine's step thread; on CUDA this is only enqueued on the current stream.
        """
        self._gather.begin_step()
        # The engine stores what pads a step in block 0, which the caches of all groups share and vLLM expects
        # to be zero: behind a sliding window, attention multiplies it by 0, and 0 times NaN is NaN.
        self._null_block_LSH.zero_()
        self._sentinels.place(work.fresh)

    def drained(self, work: StepWork) -> set[str]:
        """Return the requests of the step's work whose blocks this rank will report as sent."""
        return {item.req_id for item in work.items if isinstance(item, DrainJob) and self._owns(item.ref)}

    def step(self, work: StepWork) -> set[str]:
        """Take the step's work, copy what fits, and return the requests whose blocks may be freed now.

        Blocks only while a writer's queue of `QUEUE_ITEMS` is full.
        """
        for item in work.items:
            if not self._owns(item.ref):
                continue
            if isinstance(item, VoidRow):
                self._writers.put(item.ref.attempt_id, item)
            else:
                self._waiting.append(item)
        return self._start_copies() | self._finish_copies()

    def stop(self) -> None:
        """Write what is queued, then release everything."""
        self._writers.stop()
        self._link.send(self._load())
        self._link.close()

    def _owns(self, ref: RowRef) -> bool:
        return ref.row % self._num_ranks == self._rank

    def _start_copies(self) -> set[str]:
        """Start the copies that the pool has room for; return the requests whose attempts are over."""
        dropped: set[str] = set()
        started: list[tuple[DrainJob, Slab, torch.Tensor]] = []
        num_layers, hidden_size = self._shape_LH
        while self._waiting:
            job = self._waiting[0]
            if not self._writers.is_open(job.ref.attempt_id):
                dropped.add(job.req_id)
            else:
                slab = self._pool.acquire(job.num_tokens * self._row_bytes_per_token)
                if slab is None:
                    break
                shape = (num_layers, job.num_tokens, hidden_size)
                started.append((job, slab, self._pool.tensor(slab, self._dtype, shape)))
            self._waiting.popleft()
        copies = self._gather.start([(job.block_ids, states_LTH) for job, _, states_LTH in started])
        self._copying += [(copy, *row) for copy, row in zip(copies, started, strict=True)]
        return dropped

    def _finish_copies(self) -> set[str]:
        """Hand the copied rows to the writers; return their requests."""
        copied: set[str] = set()
        # One stream copies in order, so the first unfinished copy ends the search.
        while self._copying and self._copying[0][0].done():
            copy, job, slab, states_LTH = self._copying.popleft()
            self._writers.put(job.ref.attempt_id, CapturedRow(job, slab, states_LTH, copy.sums()))
            copied.add(job.req_id)
            self._drained_rows += 1
            self._drained_tokens += job.num_tokens
        return copied

    def _load(self) -> RankLoad:
        """Return this rank's load and totals. Called on any thread, so numbers may be from adjacent steps."""
        return RankLoad(
            rank=self._rank,
            pool_bytes=self._pool.num_bytes,
            pool_used_bytes=self._pool.used_bytes,
            pool_waiting_samples=len(self._waiting),
            writers=self._num_writers,
            writer_busy_seconds=self._writers.busy_s,
            drained_samples=self._drained_rows,
            drained_tokens=self._drained_tokens,
            drained_bytes=self._drained_tokens * self._row_bytes_per_token,
        )

    def _on_message(self, message: ToConnector) -> None:
        if isinstance(message, AskLoad):
            self._link.send(self._load())
        else:
            self._writers.put(message.attempt_id, message)
