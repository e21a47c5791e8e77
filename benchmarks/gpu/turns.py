"""One turn of one way: drained alone, or beside the products that imitate a model on the main stream."""

import itertools
import math
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from benchmarks.gpu.cache import Request
from benchmarks.gpu.ways import Flight, Way

STEP_TOKENS = 8192
"""Tokens a step of the model."""

WARM_STEPS = 4
"""Steps of a turn that do not count, until copies are under way."""

POLL_S = 50e-6
"""Between looks while nothing else can be done; the pool holds hundreds of times more in flight."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What one way did in one turn.

    `start_s` is what the host spent on starting requests, `step_s` a step of the model on the device (0
    without a model).
    """

    seconds: float
    bytes: int
    requests: int
    start_s: float
    step_s: float


@dataclass(frozen=True, slots=True)
class Beside:
    """What runs on the main stream during a turn: steps of STEP_TOKENS tokens, `num_products` each."""

    num_steps: int
    num_products: int


class Model:
    """Products of an 8B model's shape, of random numbers, on the current stream."""

    def __init__(self) -> None:
        generator = torch.Generator("cuda").manual_seed(0)

        def random(rows: int, columns: int) -> torch.Tensor:
            return torch.randn(rows, columns, generator=generator, device="cuda").bfloat16()

        self._tokens, self._weights = random(STEP_TOKENS, 4096), random(4096, 14336)
        self._out = torch.empty(STEP_TOKENS, 14336, dtype=torch.bfloat16, device="cuda")

    def step(self, num_products: int) -> torch.cuda.Event:
        """Enqueue a step; return the event of its end."""
        for _ in range(num_products):
            torch.mm(self._tokens, self._weights, out=self._out)
        end = torch.cuda.Event(enable_timing=True)
        end.record()
        return end


class Drain:
    """Requests in order through one way, driven from one thread like the worker half's."""

    def __init__(self, way: Way, requests: Iterable[Request]) -> None:
        self._way, self._requests = way, iter(requests)
        self._waiting: deque[Request] = deque()
        self._tokens = 0.0
        self._flights: deque[Flight] = deque()
        self.reset()

    def reset(self) -> None:
        """Count from here."""
        self.bytes = self.requests = 0
        self.start_s = 0.0
        self._begin = time.perf_counter()

    def turn(self, step_s: float) -> Turn:
        """Return what was done since the count began."""
        seconds = time.perf_counter() - self._begin
        return Turn(seconds, self.bytes, self.requests, self.start_s, step_s)

    def finish(self) -> None:
        """End the flights that are done."""
        while self._flights and self._flights[0].done():
            flight = self._flights.popleft()
            self.bytes += flight.request.num_bytes
            flight.end()

    def start(self, num_tokens: float) -> None:
        """Admit the requests of `num_tokens` more tokens, and start what there is room for."""
        self._tokens += num_tokens
        while self._tokens > 0 and (request := next(self._requests, None)) is not None:
            self._waiting.append(request)
            self._tokens -= request.num_tokens
        if not self._waiting:
            return
        begin = time.perf_counter()
        started = self._way.start(self._waiting)
        if not started:
            return
        self.start_s += time.perf_counter() - begin
        self.requests += len(started)
        self._flights += started
        for _ in started:
            self._waiting.popleft()

    def run_dry(self, *, waiting: bool) -> None:
        """Go on until all that was started is on the host; `waiting` also what was admitted."""
        if not waiting:
            self._waiting.clear()
        while self._flights:
            time.sleep(POLL_S)
            self.finish()
            self.start(0)


def drain_alone(way: Way, requests: Iterable[Request]) -> Turn:
    """Drain `requests` as fast as it goes, with nothing else on the device."""
    drain = Drain(way, requests)
    drain.start(math.inf)
    drain.run_dry(waiting=True)
    return drain.turn(0.0)


def drain_beside(way: Way, requests: Iterable[Request], model: Model, beside: Beside) -> Turn:
    """Drain requests, over and over, while the model runs.

    Like an engine that schedules ahead, the host is one step before the device.
    """
    drain = Drain(way, itertools.cycle(requests))
    ends = [model.step(beside.num_products)]
    for step in range(WARM_STEPS + beside.num_steps):
        if step == WARM_STEPS:
            drain.finish()
            drain.reset()
        ends.append(model.step(beside.num_products))
        drain.finish()
        drain.start(STEP_TOKENS)
        ends[-2].synchronize()
    drain.finish()
    step_s = ends[WARM_STEPS - 1].elapsed_time(ends[-2]) * 1e-3 / beside.num_steps
    turn = drain.turn(step_s)
    drain.run_dry(waiting=False)
    return turn
