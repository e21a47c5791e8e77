"""The scheduler half: which finished requests are drained, and which blocks of a step are fresh."""

from typing import Any

import pytest
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

from connector.scheduler import SchedulerHalf
from connector.wire import DrainJob, RowRef, VoidRow, hash_ids
from schemas.receipts import AttemptId
from tests.support.fake_engine import FakeRequest, Status
from tests.support.plans import JOB

REF = RowRef(AttemptId(job_id=JOB, unit=3, epoch=2), 7, 5)


def finish(
    half: SchedulerHalf,
    *,
    tokens: int = 6,
    computed: int = 5,
    blocks: int = 2,
    status=Status.FINISHED_LENGTH_CAPPED,
    ref=REF,
):
    request = FakeRequest("r-1", status, ref.params() if ref else None, computed, list(range(tokens)))
    held = half.request_finished(request, ([99], list(range(blocks))))
    return held, half.take_work().items


@pytest.mark.parametrize(
    ("change", "num_tokens", "generated"),
    [
        ({}, 5, ()),  # the sampled token has no state
        ({"tokens": 9, "computed": 8}, 8, (5, 6, 7)),  # an answer is not in the plan, so its tokens travel
        ({"computed": 9, "blocks": 4}, 5, ()),  # blocks beyond the last state are left out
    ],
)
def test_a_finished_request_is_held_and_its_job_is_of_the_tokens_with_states(change, num_tokens, generated):
    held, items = finish(SchedulerHalf(4, 1), **change)
    assert held
    assert items == [DrainJob("r-1", REF, num_tokens, (0, 1), hash_ids(range(5)), generated)]


@pytest.mark.parametrize(
    "change", [{"status": Status.FINISHED_ABORTED}, {"computed": 4}, {"blocks": 1}], ids=str
)
def test_a_request_without_all_its_states_is_void_and_its_blocks_are_freed_at_once(change):
    held, items = finish(SchedulerHalf(4, 1), **change)
    assert (held, items) == (False, [VoidRow(REF)])


def test_a_request_that_never_had_blocks_is_void():
    half = SchedulerHalf(4, 1)
    assert not half.request_finished(FakeRequest("r", Status.FINISHED_ABORTED, REF.params(), 0, [1, 2]), ())
    assert isinstance(half.take_work().items[0], VoidRow)


def test_a_request_that_is_not_ours_is_let_go():
    held, items = finish(SchedulerHalf(4, 1), ref=None)
    assert (held, items) == (False, [])


def test_work_is_handed_over_once():
    half = SchedulerHalf(4, 1)
    finish(half)
    assert half.take_work().items == []


SLOTS = 4
OTHER = [90, 91, 92, 93]
"""Another cache group's blocks."""


def new(blocks: list[int], computed: int) -> NewRequestData:
    told: dict[str, Any] = dict.fromkeys(("sampling_params", "pooling_params", "lora_request"))
    return NewRequestData(
        "new", [1] * 9, mm_features=[], block_ids=(OTHER, blocks), num_computed_tokens=computed, **told
    )


def cached(blocks: list[int] | None, computed: int, *, resumed: bool = False) -> CachedRequestData:
    told = CachedRequestData.make_empty()
    told.req_ids.append("known")
    told.new_block_ids.append(None if blocks is None else (OTHER, blocks))
    told.num_computed_tokens.append(computed)
    if resumed:
        told.resumed_req_ids.add("known")
    return told


def fresh(*requests: NewRequestData, known: CachedRequestData | None = None) -> list[int]:
    step = SchedulerOutput.make_empty()
    step.scheduled_new_reqs = list(requests)
    step.scheduled_cached_reqs = known or CachedRequestData.make_empty()
    half = SchedulerHalf(SLOTS, 1)
    half.scheduled(step)
    return half.take_work().fresh


@pytest.mark.parametrize(
    ("requests", "known", "expected"),
    [
        # All blocks of a new request are fresh, but for those that the prefix cache filled, also in part.
        ([([5, 6, 7], 0)], None, [5, 6, 7]),
        ([([5, 6, 7], 2 * SLOTS)], None, [7]),
        ([([5, 6, 7], SLOTS + 1)], None, [7]),
        # Of a running request only the added blocks come along; a resumed one begins anew.
        ([], cached([8], 3 * SLOTS), [8]),
        ([], cached(None, 3 * SLOTS), []),
        ([], cached([5, 6, 7], SLOTS, resumed=True), [6, 7]),
        ([([1], 0), ([2, 3], 0)], cached([4], SLOTS), [1, 2, 3, 4]),
    ],
)
def test_of_a_step_the_blocks_that_hold_nothing_of_their_request_yet_are_fresh(requests, known, expected):
    assert fresh(*(new(*request) for request in requests), known=known) == expected
