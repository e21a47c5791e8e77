"""What a child says is checked: it runs what others wrote. Here the test is the child, at the other end."""

import itertools
import json
import mmap
import os
import socket
import sys
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from schemas.request import ExtractRequest
from schemas.source import Sample
from service.errors import HubUnavailable, PlanningDied, QuarryError, SourceRefused
from service.plan.child.fork_server import FORK_SERVER, ForkServer
from service.plan.child.main import _Batch, _Parent, run
from service.plan.child.process import Child
from service.plan.child.task import PROGRESS, Limits, Purpose, Task
from service.plan.sources import RejectReason, RowReject, SourceRow
from service.plan.units import RowOutcome, Tokenized

LIMITS = Limits(memory_bytes=2**28, row_cpu_s=1.0, silence_s=0.2)
REQUEST = ExtractRequest.model_validate(
    {
        "model": "org/model",
        "source": {"kind": "inline", "samples": [{"text": "x"}]},
    }
)
TASK = Task(Purpose.ESTIMATE, REQUEST, None, (), None, None)
CONFIG = {
    "architectures": ["Any"],
    "num_layers": 2,
    "hidden_size": 8,
    "vocab_size": 16,
    "dtype": "float32",
    "max_model_len": 64,
}


@pytest.fixture
def keeper() -> Iterator[tuple[Connection, Connection]]:
    """Return the parent's and the keeper's end of what says how a child ended."""
    life, keeper = Pipe()
    with life, keeper:
        yield life, keeper


@pytest.fixture
def pipe() -> Iterator[tuple[Connection, Connection]]:
    """Return the parent's and the child's end of the way to talk."""
    ours, theirs = Pipe()
    with ours, theirs:
        yield ours, theirs


@pytest.fixture
def ends(
    pipe: tuple[Connection, Connection], keeper: tuple[Connection, Connection]
) -> tuple[Connection, Connection, mmap.mmap]:
    """Return the parent's ends of the child that is started next."""
    progress = mmap.mmap(-1, PROGRESS.size)
    PROGRESS.pack_into(progress, 0, -1, 0, 1)  # it has begun
    return pipe[0], keeper[0], progress


@pytest.fixture
def said(
    monkeypatch: pytest.MonkeyPatch,
    pipe: tuple[Connection, Connection],
    ends: tuple[Connection, Connection, mmap.mmap],
) -> Connection:
    """Return the end of a child that is started next."""
    monkeypatch.setattr(FORK_SERVER, "start_child", lambda: ends)
    return pipe[1]


def say(said: Connection, *answer: Any, body: bytes = b"") -> None:
    said.send_bytes(json.dumps(answer).encode() + b"\n" + body)


def start() -> Child:
    return Child(TASK, LIMITS)


def test_rows_are_the_same_on_the_other_side(said: Connection) -> None:
    ids = b"\1\0\0\0\xff\xff\xff\x7f"
    say(said, "rows", [["a", 2, ""], ["\ud800", "empty", "no tokens"]], body=ids + b"\0\1")
    say(said, "rows", [["c", 1, ""]], body=b"\5\0\0\0\1")
    say(said, "done")
    first, second, third = start().rows()
    assert [row.position for row in (first, second, third)] == [0, 1, 2]
    assert isinstance(first.result, Tokenized) and first.source_id == "a"
    assert (first.result.ids.tolist(), first.result.mask.tolist()) == ([1, 2**31 - 1], [0, 1])
    assert (second.source_id, second.result) == ("\ud800", RowReject(RejectReason.EMPTY, "no tokens"))
    assert isinstance(third.result, Tokenized) and third.result.ids.tolist() == [5]


def test_no_message_of_rows_is_too_long_and_a_row_that_would_be_is_rejected(
    said: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.plan.child.main.ROWS_BYTES", 200)
    monkeypatch.setattr("service.plan.child.process.MAX_ROWS_BYTES", 220)
    parent = _Parent(said, mmap.mmap(-1, PROGRESS.size), 0.0)
    batch = _Batch(parent)
    for position, (source_id, num) in enumerate((("a", 20), ("b", 20), ("c", 50), ("d", 20))):
        row = Tokenized(np.arange(num, dtype=np.int32), np.ones(num, dtype=np.uint8))
        batch.add(SourceRow(source_id, Sample(text="x")), [RowOutcome(position, source_id, row)])
    batch.send()
    parent.send("done")
    first, second, third, fourth = start().rows()
    assert third.source_id == "c" and isinstance(third.result, RowReject)
    assert third.result.reason is RejectReason.TOO_LONG and "1 rows, takes 2" in third.result.detail
    for row in (first, second, fourth):
        assert isinstance(row.result, Tokenized) and row.result.ids.tolist() == list(range(20))


def test_known_rows_have_a_place_and_new_ones_a_key(said: Connection) -> None:
    say(said, "rows", [None, ["b", 1, "0f" * 16], None], body=b"\5\0\0\0\1")
    say(said, "done")
    outcomes = list(start().rows(Path("keys")))
    assert [(row.position, row.result is None, row.content_hash) for row in outcomes] == [
        (0, True, b""),
        (1, False, b"\x0f" * 16),
        (2, True, b""),
    ]


NO_ANSWERS = [
    ["rows", "rows"],
    ["rows", [[5, 1, ""]]],
    ["rows", [["a", 3, ""]]],
    ["rows", [["a", 1, "00" * 16]]],
    ["rows", [["a", 1]]],
    ["rows", [None]],
    ["rows", [["a", 0, ""]]],
    ["rows", [["a", -1, ""]]],
    ["rows", [["a", "no-such-reason", ""]]],
    ["rows", [{}]],
    ["rows", [[]]],
    ["ready", None],
    ["error", "source-refused", 5, None, None],
    *([], {}, 5),
]


@pytest.mark.parametrize(
    "message",
    [
        *(json.dumps(answer).encode() + b"\n" + b"\0" * 10 for answer in NO_ANSWERS),
        *(b"", b"{", b"[" * 10**4, b"\xff"),
    ],
    ids=lambda message: repr(message)[:40],
)
def test_what_is_no_answer_ends_the_plan(said: Connection, message: bytes) -> None:
    said.send_bytes(message)
    with pytest.raises(PlanningDied):
        list(start().rows())


NO_OPENINGS = [
    ["done"],
    ["opened", CONFIG, None, None],
    ["opened", CONFIG, 5, None, None],
    ["opened", CONFIG, None, None, 5],
    *(["opened", CONFIG | wrong, None, None, None] for wrong in ({"num_layers": 0}, {"dtype": "int8"})),
]


@pytest.mark.parametrize("answer", NO_OPENINGS, ids=str)
def test_what_is_no_opening_ends_the_plan(said: Connection, answer: Any) -> None:
    say(said, *answer)
    with pytest.raises(PlanningDied, match="unexpected message"):
        start().opening()


def test_a_child_that_gets_on_is_waited_for(
    said: Connection, ends: tuple[Connection, Connection, mmap.mmap]
) -> None:
    """As it takes the fingerprint of a large source: no row begins meanwhile."""
    beats = itertools.count(1)

    def watch() -> None:
        beat = next(beats)
        PROGRESS.pack_into(ends[2], 0, -1, 0, beat + 1)
        if beat == 10:
            say(said, "opened", CONFIG, None, ["a.jsonl"], "file:0")

    opening = Child(TASK, LIMITS, watch).opening()
    assert (opening.source, opening.fingerprint, next(beats)) == (["a.jsonl"], "file:0", 11)


@pytest.mark.parametrize(("purpose", "num_bytes"), [(Purpose.CHECK, 2**18), (Purpose.PLAN, 2**26)])
def test_a_message_is_bounded(said: Connection, purpose: Purpose, num_bytes: int) -> None:
    os.write(said.fileno(), (num_bytes + 1).to_bytes(4, "big"))
    with pytest.raises(PlanningDied, match="no whole message"):
        Child(replace(TASK, purpose=purpose), LIMITS).checked()


def test_a_message_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.plan.child.fork_server.MESSAGE_S", 1)
    monkeypatch.setattr(FORK_SERVER, "_start", lambda: None)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        monkeypatch.setattr(FORK_SERVER, "_control", ours, raising=False)
        child = start()
        _, files, _, _ = socket.recv_fds(theirs, 1, 3)
        os.write(files[0], (10).to_bytes(4, "big"))
        with pytest.raises(PlanningDied, match="no whole message"):
            list(child.rows())
        child.close()
        for file in files:
            os.close(file)


def test_a_silent_child_is_given_up(said: Connection) -> None:
    with pytest.raises(PlanningDied, match=r"did not go on for 0\.2 s"):
        list(start().rows())


@pytest.mark.parametrize(
    ("answer", "kind", "detail"),
    [
        (["error", "source-refused", "no row", "field", None], SourceRefused, "no row"),
        (["error", "unauthorized", "no key", "field", None], QuarryError, "no key"),
        (["crash", True, "KeyError: 5"], QuarryError, "internal error: KeyError: 5"),
    ],
)
def test_a_child_raises_its_own_errors_alone(
    said: Connection, answer: list[Any], kind: type[QuarryError], detail: str
) -> None:
    say(said, *answer)
    with pytest.raises(QuarryError) as caught:
        list(start().rows())
    assert (type(caught.value), caught.value.detail) == (kind, detail)
    assert caught.value.field == ("field" if answer[0] == "error" else None)


@pytest.mark.parametrize(
    ("said_s", "wait_s"), [([7.5], 7.5), ([-1.0], 0.0), ([1e9], 0.0), ([float("nan")], 0.0), ([], 0.0)]
)
def test_a_wait_that_the_hub_asked_a_child_for_is_kept_within_bounds(
    said: Connection, said_s: list[float], wait_s: float
) -> None:
    say(said, "error", "hub-unavailable", "busy", None, None, *said_s)
    with pytest.raises(HubUnavailable) as caught:
        list(start().rows())
    assert caught.value.wait_s == wait_s


@pytest.mark.parametrize(("status", "why"), [(b"3", "its exit code is 3"), (None, "its keeper ended")])
def test_a_child_that_ends_without_a_word_ends_the_plan(
    said: Connection, keeper: tuple[Connection, Connection], status: bytes | None, why: str
) -> None:
    if status is not None:
        keeper[1].send_bytes(status)
    said.close()
    keeper[1].close()
    with pytest.raises(PlanningDied, match=why):
        list(start().rows())


def test_a_child_that_cannot_start_ends_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    server = ForkServer()
    monkeypatch.setattr("service.plan.child.process.FORK_SERVER", server)
    monkeypatch.setattr("sys.executable", "/no/such/python")
    with pytest.raises(PlanningDied, match="No such file"):
        start()
    server._control.close()


def test_a_child_that_breaks_says_so_and_its_process_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.setrlimit", lambda *_: None)  # it would hold for the other tests too
    no_timer = Limits(memory_bytes=2**28, row_cpu_s=0.0, silence_s=0.2)
    ours, theirs = Pipe()
    with ours, theirs:
        ours.send((5, no_timer))
        with pytest.raises(AttributeError) as caught:
            run(theirs, mmap.mmap(-1, PROGRESS.size))
        assert json.loads(ours.recv_bytes()) == ["crash", True, f"AttributeError: {caught.value}"]


def test_a_child_whose_parent_has_hung_up_ends_without_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os._exit", sys.exit)
    ours, theirs = Pipe()
    ours.close()
    with theirs, pytest.raises(SystemExit) as ended:
        _Parent(theirs, mmap.mmap(-1, PROGRESS.size), 0.0).send("done")
    assert ended.value.code == 0


def test_a_child_whose_parent_has_hung_up_on_its_answer_ends_without_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where something is unread, a socket's other end is reset; it does not just end."""
    monkeypatch.setattr("os._exit", sys.exit)
    ours, theirs = Pipe()
    with theirs:
        parent = _Parent(theirs, mmap.mmap(-1, PROGRESS.size), 0.0)
        parent.send("opened")
        ours.close()
        with pytest.raises(SystemExit) as ended:
            parent.received()
    assert ended.value.code == 0
