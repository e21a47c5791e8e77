"""The scheduler half: decides which finished requests are drained.

Runs in the engine core's process, on its step thread.

Only a request that finished by stop, length or repetition with every token computed becomes a drain job; its
blocks stay held until the worker half reports it. Any other request of ours is void: its blocks are freed at
once and the writer is told.
"""

from typing import Any

from connector.wire import DrainJob, RowRef, StepWork, VoidRow, hash_ids

DRAINED_STATUSES = frozenset({"FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED", "FINISHED_REPETITION"})
"""Names of vLLM's RequestStatus for which the states are complete. Compared by name, since an abort must
never match by value.
"""


class SchedulerHalf:
    """Collects the step's drain jobs and void rows until the next step carries them to the worker half."""

    def __init__(self, block_size: int, group_id: int) -> None:
        """Take `block_size` (slots) and `group_id` of the cache-only layer, not the target's."""
        self._block_size = block_size
        self._group_id = group_id
        self._work = StepWork()

    def request_finished(self, request: Any, block_ids: tuple[list[int], ...]) -> bool:
        """Turn a finished request into a drain job or a void row.

        Return True if its blocks must be held until the worker half has copied them.
        """
        ref = RowRef.of(request.kv_transfer_params)
        if ref is None:
            return False
        # The last token was sampled but never an input, so the cache holds no state for it.
        ids = list(request.all_token_ids)
        num_tokens = len(ids) - 1
        held = len(block_ids[self._group_id]) if self._group_id < len(block_ids) else 0
        if (
            request.status.name not in DRAINED_STATUSES
            or request.num_computed_tokens < num_tokens
            or held * self._block_size < num_tokens
        ):
            self._work.items.append(VoidRow(ref))
            return False
        num_blocks = -(-num_tokens // self._block_size)
        self._work.items.append(
            DrainJob(
                req_id=request.request_id,
                ref=ref,
                num_tokens=num_tokens,
                block_ids=tuple(block_ids[self._group_id][:num_blocks]),
                planned_hash=hash_ids(ids[: ref.planned_tokens]),
                generated_ids=tuple(ids[ref.planned_tokens : num_tokens]),
            )
        )
        return True

    def scheduled(self, step: Any) -> None:  # vLLM's SchedulerOutput
        """Note the blocks allocated in this step, except those that the prefix cache filled."""
        for request in step.scheduled_new_reqs:
            self._note_fresh(request.block_ids, request.num_computed_tokens)
        cached = step.scheduled_cached_reqs
        for req_id, blocks, num_computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            # For a running request, only the blocks added in this step are listed.
            self._note_fresh(blocks, num_computed if req_id in cached.resumed_req_ids else 0)

    def _note_fresh(self, blocks: tuple[list[int], ...] | None, num_computed: int) -> None:
        if blocks:
            # A partly computed block was copied from the prefix cache.
            self._work.fresh += blocks[self._group_id][-(-num_computed // self._block_size) :]

    def take_work(self) -> StepWork:
        """Return the work collected since the last call, and start a new collection."""
        work, self._work = self._work, StepWork()
        return work
