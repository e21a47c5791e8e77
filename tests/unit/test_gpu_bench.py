"""The parts of the GPU benchmark that no GPU is needed for."""

import math

import pytest

from benchmarks.gpu_cache import NUM_SLOTS, TOKEN_BYTES, Request, random_requests
from benchmarks.gpu_report import base_of, figures, table
from benchmarks.gpu_turns import Drain, GpuTurn


class Landing:
    """A flight that is done when told so."""

    def __init__(self, request, landed):
        self.request, self._landed = request, landed
        self.is_done = False

    def done(self):
        return self.is_done

    def end(self):
        self._landed.append(self.request)


class RoomFor:
    """A way with room for a number of requests."""

    def __init__(self, room):
        self.room, self.flights, self.landed = room, [], []

    def start(self, requests):
        started = [Landing(request, self.landed) for request in list(requests)[: self.room]]
        self.room -= len(started)
        self.flights += started
        return started


def turn(num_bytes, seconds, step_s=0.0):
    return GpuTurn(
        seconds=seconds,
        bytes=num_bytes,
        requests=2,
        start_s=1e-4,
        step_s=step_s,
        device_bytes=0,
        device_allocations=8,
        pinned_allocations=2,
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
    way.flights[1].is_done = True
    drain.finish()
    assert way.landed == []
    way.flights[0].is_done = True
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
        "model alone": [turn(0, 1.0, step_s=2.0), turn(0, 1.0, step_s=4.0)],
        "pinned copy": [turn(100, 1.0, step_s=2.0), turn(100, 2.0, step_s=4.0)],
        "Quarry": [turn(90, 1.0, step_s=3.0), turn(80, 2.0, step_s=6.0)],
    }
    of_cell = figures(turns)
    assert base_of(turns) == "pinned copy"
    assert (of_cell["Quarry"].of_base.low, of_cell["Quarry"].of_base.high) == (0.8, 0.9)
    assert of_cell["Quarry"].step_ratio is not None
    assert of_cell["Quarry"].step_ratio.median == 1.5
    assert of_cell["Quarry"].device_allocations.median == 4.0
    assert "| 0.85 (0.80..0.90) |" in table(of_cell)


def test_a_cache_too_small_for_the_requests_is_named():
    with pytest.raises(ValueError, match="--cache-gib"):
        random_requests("long", 2 * 8192 * TOKEN_BYTES, 600, seed=0)
