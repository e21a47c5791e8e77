"""What a child says is checked: it runs what others wrote. Here the test is the child, at the other end."""

import json
import mmap
import os
import socket
from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import pytest

from service.errors import PlanningDied, QuarryError, SourceRefused
from service.plan.child.fork_server import FORK_SERVER, ChildEnds
from service.plan.child.process import Child
from service.plan.child.task import PROGRESS, Limits, TemplateCheck
from service.plan.sources import RejectReason, RowReject
from service.plan.units import Tokenized

LIMITS = Limits(memory_bytes=2**28, row_cpu_s=1.0, silence_s=0.2)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Iterator[Connection]:
    """Return the end of a child that is started next."""
    ours, theirs = Pipe()
    life, keeper = Pipe()
    ends = ChildEnds(ours, life, mmap.mmap(-1, PROGRESS.size))
    monkeypatch.setattr(FORK_SERVER, "start_child", lambda: ends)
    with theirs, keeper, ours, life:
        yield theirs


def say(said: Connection, *answer: Any, body: bytes = b"") -> None:
    said.send_bytes(json.dumps(answer).encode() + b"\n" + body)


def test_rows_are_the_same_on_the_other_side(said: Connection) -> None:
    ids = b"\1\0\0\0\xff\xff\xff\x7f"
    say(said, "rows", [["a", 2], ["\ud800", "empty", "no tokens"]], body=ids + b"\0\1")
    say(said, "rows", [["c", 1]], body=b"\5\0\0\0\1")
    say(said, "done")
    first, second, third = Child(TemplateCheck(""), LIMITS).rows()
    assert [row.position for row in (first, second, third)] == [0, 1, 2]
    assert isinstance(first.result, Tokenized) and first.source_id == "a"
    assert (first.result.ids.tolist(), first.result.mask.tolist()) == ([1, 2**31 - 1], [0, 1])
    assert (second.source_id, second.result) == ("\ud800", RowReject(RejectReason.EMPTY, "no tokens"))
    assert isinstance(third.result, Tokenized) and third.result.ids.tolist() == [5]


@pytest.mark.parametrize(
    "answer",
    [
        ["rows", "rows"],
        ["rows", [[5, 1]]],
        ["rows", [["a", 3]]],
        ["rows", [["a", 0]]],
        ["rows", [["a", -1]]],
        ["rows", [["a", "no-such-reason", ""]]],
        ["rows", [{}]],
        ["rows", [[]]],
        ["ready", None],
        ["error", "source-refused", 5, None, None],
        [],
        {},
        5,
    ],
    ids=str,
)
def test_what_is_no_answer_ends_the_plan(said: Connection, answer: Any) -> None:
    said.send_bytes(json.dumps(answer).encode() + b"\n" + b"\0" * 10)
    with pytest.raises(PlanningDied, match="unexpected message"):
        list(Child(TemplateCheck(""), LIMITS).rows())


@pytest.mark.parametrize(
    "message", [b"", b"{", b"[" * 10**4, b"\xff"], ids=["empty", "open", "deep", "bytes"]
)
def test_what_is_no_message_ends_the_plan(said: Connection, message: bytes) -> None:
    said.send_bytes(message)
    with pytest.raises(PlanningDied):
        list(Child(TemplateCheck(""), LIMITS).rows())


def test_a_message_is_bounded(said: Connection) -> None:
    os.write(said.fileno(), (2**31 - 1).to_bytes(4, "big"))
    with pytest.raises(PlanningDied, match="no whole message"):
        list(Child(TemplateCheck(""), LIMITS).rows())


def test_a_message_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.plan.child.fork_server.MESSAGE_S", 1)
    monkeypatch.setattr(FORK_SERVER, "_start", lambda: None)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        monkeypatch.setattr(FORK_SERVER, "_control", ours, raising=False)
        child = Child(TemplateCheck(""), LIMITS)
        _, files, _, _ = socket.recv_fds(theirs, 1, 3)
        os.write(files[0], (10).to_bytes(4, "big"))
        with pytest.raises(PlanningDied, match="no whole message"):
            list(child.rows())
        child.close()
        for file in files:
            os.close(file)


def test_a_silent_child_is_given_up(said: Connection) -> None:
    with pytest.raises(PlanningDied, match=r"did not go on for 0\.2 s"):
        list(Child(TemplateCheck(""), LIMITS).rows())


@pytest.mark.parametrize(("slug", "kind"), [("source-refused", SourceRefused), ("unauthorized", QuarryError)])
def test_a_child_raises_its_own_errors_alone(said: Connection, slug: str, kind: type[QuarryError]) -> None:
    say(said, "error", slug, "detail", "field", None)
    with pytest.raises(QuarryError, match="detail") as caught:
        list(Child(TemplateCheck(""), LIMITS).rows())
    assert (type(caught.value), caught.value.field) == (kind, "field")
