"""Whose the cores' seconds were: told by names of processes and threads."""

import threading

import psutil
import pytest

from benchmarks.report import stages_table
from benchmarks.stages import CORE, FRONT, STAGES, WORKER, WRITERS, between, stage_of, used
from benchmarks.turns import EngineTurn


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


def test_the_threads_of_a_tree_are_found():
    found = used([psutil.Process()])
    assert (FRONT, threading.get_native_id()) in found
    assert all(seconds >= 0 for seconds in found.values())


def test_the_table_has_shares_of_all_cores():
    turns = [
        EngineTurn(2.0, 3.0, 0, 0, 0, dict(zip(STAGES, seconds, strict=True)))
        for seconds in ([2.0, 1.0, 0.0, 0.4], [2.4, 1.0, 0.0, 0.4], [2.2, 1.0, 0.0, 0.4])
    ]
    lines = stages_table({"quarry": turns}, cores=2).splitlines()
    assert [cell.strip() for cell in lines[-1].strip("|").split("|")][1:] == ["55%", "25%", "0%", "10%"]
