"""The scheduler half: decides which finished requests are drained.

Runs in the engine core's process, on its step thread.

Only a request that finished by stop or length and has every token computed becomes a drain job; its blocks
stay held until the worker half reports it. Anything else of ours is void: its blocks are freed at once and
the writer is informed.
"""

from collections.abc import Iterator
from typing import Any, Protocol

from connector.wire import DrainJob, RowRef, StepWork, VoidRow, hash_ids

DRAINED_STATUSES = frozenset({"FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED", "FINISHED_REPETITION"})
"""Names of vLLM's RequestStatus after which the states are whole. Compared by name.

An abort must never match by value.
"""


class FinishedRequest(Protocol):
    """What this half reads of vLLM's Request."""

    request_id: str
    status: Any
    kv_transfer_params: dict[str, Any] | None
    num_computed_tokens: int

    @property
    def all_token_ids(self) -> Any:  # noqa: ANN401 - vLLM's own sequence type
        """Prompt and output token ids."""


class ScheduledStep(Protocol):
    """What this half reads of vLLM's SchedulerOutput."""

    scheduled_new_reqs: list[Any]
    scheduled_cached_reqs: Any


class SchedulerHalf:
    """Collects the step's drain jobs and void rows until the next step carries them to the worker half."""

    def __init__(self, block_size: int, group_id: int) -> None:
        """`block_size` in slots and `group_id` are the cache-only layer's own, not the target's."""
        self._block_size = block_size
        self._group_id = group_id
        self._work = StepWork()

    def request_finished(self, request: FinishedRequest, block_ids: tuple[list[int], ...]) -> bool:
        """Take over a finished request.

        Return True if its blocks must be held until the worker half has copied them.
        """
        ref = RowRef.of(request.kv_transfer_params)
        if ref is None:
            return False
        # The last token was sampled and never an input, so the cache holds no state for it.
        num_tokens = len(request.all_token_ids) - 1
        reason = self._void_reason(request, block_ids, num_tokens)
        if reason is not None:
            self._work.items.append(VoidRow(ref, reason))
            return False
        ids = list(request.all_token_ids)
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

    def _void_reason(
        self, request: FinishedRequest, block_ids: tuple[list[int], ...], num_tokens: int
    ) -> str | None:
        status = request.status.name
        if status not in DRAINED_STATUSES:
            return f"the request ended as {status}"
        if request.num_computed_tokens < num_tokens:
            return f"only {request.num_computed_tokens} of {num_tokens} tokens were computed"
        held = len(block_ids[self._group_id]) if self._group_id < len(block_ids) else 0
        if held * self._block_size < num_tokens:
            return f"{held} blocks of {self._block_size} slots cannot hold {num_tokens} tokens"
        return None

    def scheduled(self, step: ScheduledStep) -> None:
        """Note the blocks that this step was given; those that the prefix cache filled are not among them."""
        for table, num_computed in _tables(step):
            blocks = table[self._group_id] if table else []
            # A block that is computed in part was copied from the prefix cache.
            self._work.fresh += blocks[-(-num_computed // self._block_size) :]

    def take_work(self) -> StepWork:
        """Return what finished since the last call, and begin anew."""
        work, self._work = self._work, StepWork()
        return work


def _tables(step: ScheduledStep) -> Iterator[tuple[tuple[list[int], ...] | None, int]]:
    """Yield each scheduled request's block ids by group, and how many of their tokens are computed.

    A running request's are only those that were added in this step.
    """
    for request in step.scheduled_new_reqs:
        yield request.block_ids, request.num_computed_tokens
    cached = step.scheduled_cached_reqs
    for req_id, blocks, num_computed in zip(
        cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
    ):
        yield blocks, num_computed if req_id in cached.resumed_req_ids else 0
