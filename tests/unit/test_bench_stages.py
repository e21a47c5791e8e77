"""Whose the cores' seconds were: told by names of processes and threads."""

import pytest

from benchmarks.meter import CORE, FRONT, WORKER, WRITERS, between, stage_of


@pytest.mark.parametrize(
    ("process", "thread", "stage"),
    [
        ("VLLM::Worker", "VLLM::Worker\n", WORKER),
        ("VLLM::Worker_TP1", "gloo_tcp_loop\n", WORKER),
        ("VLLM::Worker", "quarry-writer-0\n", WRITERS),
        ("VLLM::EngineCore", "VLLM::EngineCor\n", CORE),
        ("VLLM::EngineCore", "quarry-writer-1\n", WRITERS),
        ("python", "python\n", FRONT),
        ("python", "", FRONT),
    ],
)
def test_a_thread_is_told_by_its_names(process, thread, stage):
    assert stage_of(process, thread) == stage


def test_what_was_used_between_is_summed_by_stage_threads_that_began_meanwhile_included():
    before = {(WORKER, 1): 5.0, (WRITERS, 2): 1.0, (FRONT, 3): 2.0}
    after = {(WORKER, 1): 6.5, (WRITERS, 2): 1.25, (WRITERS, 4): 0.5}
    assert between(before, after) == {WORKER: 1.5, WRITERS: 0.75, CORE: 0.0, FRONT: 0.0}
