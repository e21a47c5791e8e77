"""Which blocks of a step are fresh, by vLLM's own SchedulerOutput."""

from typing import Any

from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

from connector.scheduler import SchedulerHalf

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


def test_every_block_of_a_new_request_is_fresh_in_its_own_group():
    assert fresh(new([5, 6, 7], 0)) == [5, 6, 7]


def test_blocks_that_the_prefix_cache_filled_are_not():
    assert fresh(new([5, 6, 7], 2 * SLOTS)) == [7]


def test_a_block_that_the_prefix_cache_filled_in_part_is_not():
    assert fresh(new([5, 6, 7], SLOTS + 1)) == [7]


def test_of_a_running_request_only_the_added_blocks_are_told_and_all_are_fresh():
    assert fresh(known=cached([8], 3 * SLOTS)) == [8]
    assert fresh(known=cached(None, 3 * SLOTS)) == []


def test_a_resumed_request_starts_anew_behind_what_the_prefix_cache_holds_of_it():
    assert fresh(known=cached([5, 6, 7], SLOTS, resumed=True)) == [6, 7]


def test_requests_of_one_step_are_told_together_and_once():
    step = SchedulerOutput.make_empty()
    step.scheduled_new_reqs = [new([1], 0), new([2, 3], 0)]
    step.scheduled_cached_reqs = cached([4], SLOTS)
    half = SchedulerHalf(SLOTS, 1)
    half.scheduled(step)
    assert half.take_work().fresh == [1, 2, 3, 4]
    assert half.take_work().fresh == []
