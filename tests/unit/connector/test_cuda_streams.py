"""The CUDA gather on an emulated device, whose streams run in any order that their events allow."""

import random
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from connector.cuda_gather import PIECES, CudaGather
from connector.sums import word_type

BLOCKS, LAYERS, SLOTS, HIDDEN = 24, 2, 4, 8
STEPS, REQUESTS = 60, 3
ROWS_OF_STAGE = 10
ATEN = torch.ops.aten


class Mark:
    """The place in a stream at which an event was recorded."""

    reached = False


class Stream:
    def __init__(self, *_: object, **__: object) -> None:
        self.queue: deque[Mark | Callable[[], object]] = deque()
        Device.streams.append(self)

    def wait_event(self, event: "Event") -> None:
        """What is enqueued from now on waits for the event as it was last recorded."""
        if event.mark is not None:
            mark = event.mark
            self.queue.append(lambda: mark.reached)

    def run_one(self) -> None:
        """Run what is first in line, unless that waits for another stream."""
        if self.queue:
            first = self.queue[0]
            if isinstance(first, Mark):
                first.reached = True
            elif first() is False:
                return
            self.queue.popleft()


class Event:
    def __init__(self) -> None:
        self.mark: Mark | None = None

    def record(self, stream: Stream) -> None:
        self.mark = Mark()
        stream.queue.append(self.mark)

    def query(self) -> bool:
        Device.run_some()
        return self.mark is None or self.mark.reached


class Device(TorchDispatchMode):
    """Puts device operations into the current stream; what the host does is done at once."""

    streams: ClassVar[list[Stream]] = []
    current: Stream
    asleep: Stream
    chance: random.Random

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {name: value for name, value in (kwargs or {}).items() if name != "pin_memory"}
        copies_later = func is ATEN.copy_.default and len(args) > 2 and args[2]
        if not copies_later and func not in (ATEN.index_select.out, ATEN.sum.IntList_out):
            return func(*args, **kwargs)
        Device.current.queue.append(lambda: func(*args, **kwargs))
        return kwargs.get("out", args[0])

    @classmethod
    def run_some(cls) -> None:
        """Run some operations; one stream does nothing for a while, as behind a large kernel."""
        if cls.chance.random() < 0.1:
            cls.asleep = cls.chance.choice(cls.streams)
        with _disable_current_modes():
            for _ in range(cls.chance.randrange(8)):
                stream = cls.chance.choice(cls.streams)
                if stream is not cls.asleep:
                    stream.run_one()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Device.current)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: setattr(Device, "current", stream))
    Device.streams.clear()
    Device.chance = random.Random(7)
    Device.asleep = Device.current = Stream()
    return Device()


def wrong_copies(kind: type[CudaGather]) -> int:
    """Drain requests whose blocks are written anew as soon as they are free; count the wrong copies."""
    chance, free, wrong = Device.chance, set(range(BLOCKS)), 0
    cache_BLSH = torch.zeros(BLOCKS, LAYERS, SLOTS, HIDDEN)
    gather = kind(cache_BLSH, ROWS_OF_STAGE * (HIDDEN * 4 + 8))
    written: list[Any] = []
    flying: list[Any] = []
    for step in range(10 * STEPS):
        gather.begin_step()
        outs = [torch.empty(states.shape) for _, states in written]
        copies = gather.start([(ids, out) for (ids, _), out in zip(written, outs, strict=True)])
        flying += [(*one, out, copy) for one, out, copy in zip(written, outs, copies, strict=True)]
        written = []
        while step < STEPS and len(written) < REQUESTS and len(free) >= 3:
            num_tokens = chance.randint(1, 3 * SLOTS)
            ids = chance.sample(sorted(free), -(-num_tokens // SLOTS))
            free.difference_update(ids)
            states_LTH = torch.randn(LAYERS, len(ids) * SLOTS, HIDDEN)
            for place, block in enumerate(ids):
                part_LSH = states_LTH[:, place * SLOTS : (place + 1) * SLOTS]
                cache_BLSH[block].copy_(part_LSH, non_blocking=True)
            written.append((ids, states_LTH[:, :num_tokens].contiguous()))
        Device.run_some()
        for one in [one for one in flying if one[3].done()]:
            ids, states_LTH, out_LTH, copy = one
            sums_LT = states_LTH.view(word_type(HIDDEN * 4)).sum(-1)
            right = torch.equal(out_LTH, states_LTH) and torch.equal(torch.from_numpy(copy.sums()), sums_LT)
            wrong += not right
            flying.remove(one)
            free.update(ids)
        if step >= STEPS and not flying:
            return wrong
    raise AssertionError("the streams wait for each other")


class NeverWaitsForItsStage(CudaGather):
    def _move(self, parts: Any) -> Any:
        self._emptied = [None] * PIECES
        return super()._move(parts)


class NeverWaitsForTheStates(CudaGather):
    def begin_step(self) -> None:
        """Note nothing."""


class NeverWaitsForTheGather(CudaGather):
    def _move(self, parts: Any) -> Any:
        self._gathered = SimpleNamespace(record=lambda _: None, mark=None)
        return super()._move(parts)


@pytest.mark.parametrize(
    ("kind", "is_right"),
    [
        (CudaGather, True),
        (NeverWaitsForItsStage, False),
        (NeverWaitsForTheStates, False),
        (NeverWaitsForTheGather, False),
    ],
)
def test_every_copy_is_right_in_whatever_order_streams_run_and_each_wait_is_needed(device, kind, is_right):
    with device:
        try:
            wrong = wrong_copies(kind)
        except IndexError:  # states were written over row numbers that the gather had not read yet
            wrong = 1
    assert (wrong == 0) is is_right
