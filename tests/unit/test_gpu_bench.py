"""The parts of the GPU benchmark that no GPU is needed for."""

import importlib
import math
import sys

import pytest
import torch

from benchmarks.gpu.__main__ import parts_of
from benchmarks.gpu.agreement import Agreement
from benchmarks.gpu.cache import NUM_SLOTS, TOKEN_BYTES, Request, random_requests
from benchmarks.gpu.cases import BORDER_LENGTHS, CASES, OPTIONS, SHARED_PREFIX_TOKENS, prompt_units
from benchmarks.gpu.check import WrongBytes, compare
from benchmarks.gpu.drain import MODEL, PINNED, QUARRY, SHARE, STEP, figures, table
from benchmarks.gpu.turns import Drain, Turn
from benchmarks.gpu.ways import Flight
from connector.gather import CpuGather

ABSENT = ("vllm", "transformers", "pyarrow", "pydantic", "safetensors", "xxhash")
"""What a machine may lack that measures the bytes and the drain alone."""


class RoomFor:
    """A way with room for a number of requests, whose copies are done when the test says so."""

    def __init__(self, room):
        self.room, self.flights, self.done, self.landed = room, [], set(), []

    def start(self, requests):
        started = [self.flight(request) for request in list(requests)[: self.room]]
        self.room -= len(started)
        self.flights += started
        return started

    def flight(self, request):
        return Flight(
            request, torch.empty(0), lambda: request in self.done, lambda: self.landed.append(request)
        )


def turn(num_bytes, seconds, step_s=0.0):
    return Turn(
        seconds=seconds,
        bytes=num_bytes,
        requests=2,
        start_s=1e-4,
        step_s=step_s,
    )


def test_requests_lie_in_blocks_of_their_own():
    requests = random_requests("typical", 200 * 512 * TOKEN_BYTES, 10_000, seed=0)
    blocks = [block for request in requests for block in request.block_ids]
    assert len(set(blocks)) == len(blocks)
    assert sum(request.num_bytes for request in requests) >= 200 * 512 * TOKEN_BYTES
    for request in requests:
        assert 0 <= len(request.block_ids) * NUM_SLOTS - request.num_tokens < NUM_SLOTS


def test_a_drain_starts_what_has_room_and_lands_in_order():
    requests = [Request((index,), 10) for index in range(5)]
    way = RoomFor(2)
    drain = Drain(way, requests)
    drain.start(math.inf)
    assert (drain.requests, len(way.flights)) == (2, 2)
    way.done.add(requests[1])
    drain.finish()
    assert way.landed == []
    way.done.add(requests[0])
    drain.finish()
    assert way.landed == requests[:2]
    assert drain.bytes == 20 * TOKEN_BYTES
    way.room = 9
    drain.start(0)
    assert [flight.request for flight in way.flights[2:]] == requests[2:]


def test_a_drain_admits_no_more_tokens_than_the_model_finished():
    drain = Drain(way := RoomFor(9), [Request((index,), 10) for index in range(9)])
    drain.start(15)
    assert len(way.flights) == 2
    drain.start(4)
    assert len(way.flights) == 2
    drain.start(2)
    assert len(way.flights) == 3


def test_ratios_are_taken_within_a_round():
    turns = {
        PINNED: [turn(100, 1.0, step_s=2.0), turn(100, 2.0, step_s=4.0)],
        MODEL: [turn(0, 1.0, step_s=2.0), turn(0, 1.0, step_s=4.0)],
        QUARRY: [turn(90, 1.0, step_s=3.0), turn(80, 2.0, step_s=6.0)],
    }
    of_cell = figures(turns)
    ours = of_cell[QUARRY]
    assert (ours[SHARE].low, ours[SHARE].high) == (0.8, 0.9)
    assert ours[STEP].median == 1.5
    assert " 0.85 (0.80..0.90) |" in table(of_cell)
    assert STEP not in figures({PINNED: turns[PINNED]})[PINNED]


def test_a_cache_too_small_for_the_requests_is_named():
    with pytest.raises(ValueError, match="--cache-gib"):
        random_requests("long", 2 * 8192 * TOKEN_BYTES, 600, seed=0)


def test_a_copy_is_compared_as_bytes_and_by_its_sums():
    cache = torch.zeros(4, 3, NUM_SLOTS, 8, dtype=torch.bfloat16)
    out = torch.empty(3, 20, 8, dtype=torch.bfloat16)
    (copy,) = CpuGather(cache).start([((2, 1), out)])
    wanted = torch.zeros_like(out)
    flight = Flight(Request((2, 1), 20), out, copy.done, lambda: None, copy.sums)
    compare(flight, wanted, "equal")
    with pytest.raises(WrongBytes, match="sums on the device"):
        copy.sums()[1, 19] += 1
        compare(flight, wanted, "another sum")
    out[2, 19, 7] = -0.0
    with pytest.raises(WrongBytes, match="differs from the cache"):
        compare(flight, wanted, "an equal number of other bits")


def test_no_drain_is_measured_before_its_bytes_were_checked():
    assert parts_of(["drain"]) == ["bytes", "drain"]


def test_parity_is_every_case_of_it():
    assert parts_of(["speed", "parity"]) == [*CASES, "speed"]


def test_the_parts_without_an_engine_need_torch_numpy_and_psutil_alone(monkeypatch):
    ours = [name for name in sys.modules if name.startswith(("benchmarks", "connector", "schemas", "tests"))]
    for name in ours:
        monkeypatch.delitem(sys.modules, name)
    for name in ABSENT:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError):
        importlib.import_module("connector.wire")
    importlib.import_module("benchmarks.gpu.__main__")


@pytest.mark.parametrize(("captured", "nearer_elsewhere"), [((0, 2, 3), 0), ((0, 1, 3), 1)])
def test_the_layer_before_is_told_from_the_layer_asked_for(captured, nearer_elsewhere):
    generator = torch.Generator().manual_seed(0)
    truth = {layer: torch.randn((5, 16), generator=generator) for layer in range(4)}
    agreement = Agreement((0, 2, 3))
    stored = {asked: truth[got] for asked, got in zip((0, 2, 3), captured, strict=True)}
    agreement.add(stored, truth, truth)
    figures = agreement.figures()
    assert figures["2"]["rows_nearer_to_another_layer"] == nearer_elsewhere
    assert figures["2"]["rows_bit_equal"] == 1 - nearer_elsewhere
    assert (figures["2"]["relative_error_max"] > 0.5) == bool(nearer_elsewhere)
    assert figures["0"]["relative_error_max"] == figures["3"]["relative_error_max"] == 0


def test_the_prompts_cross_blocks_and_steps_and_come_again_with_tails_on_a_shared_prefix():
    first, second = prompt_units(CASES["llama-bfloat16"], vocab_size=100)
    assert set(BORDER_LENGTHS) <= {len(ids) for ids in first}
    assert max(map(len, first)) > 2 * OPTIONS["max_num_batched_tokens"]
    assert second[: len(first)] == first
    prefix = max(first, key=len)[:SHARED_PREFIX_TOKENS]
    assert all(ids[: len(prefix)] == prefix for ids in second[len(first) :])
