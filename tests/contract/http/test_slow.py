"""Callers who never end a request or never take its answer, and many at once: nobody else waits for them."""

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import httpx2
import pytest
from fastapi import FastAPI

from schemas.job import JobState
from service.api.connection import FREE_BYTES, LEAST_PART_BYTES, MAX_HEAD_BYTES, MAX_HEADERS
from service.api.gate import SMALL_BODY_BYTES
from service.api.routes import extract
from service.control import scheduling
from service.control.budget import TURNS, Turn
from service.control.request_body import read_apart
from service.store import jobs
from tests.support.api import (
    api_settings,
    job_body,
    problem_of,
    server_and_client,
    serving,
    small_target,
    stored,
)
from tests.support.waiting import wait_until

AT_ONCE = TURNS[Turn.LARGE_BODY]
JSON = b"Content-Type: application/json"
BODY = b"POST /extract HTTP/1.1\r\nHost: localhost\r\n" + JSON + b"\r\nContent-Length: 1000\r\n\r\n"
HALVES = {
    "nothing": b"",
    "half a header": b"GET /healthz HTTP/1.1\r\nHost: local",
    "half a body": BODY + b'{"model": ',
    "half of the next request": b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\nGET /jobs HTTP/1.1\r\nHo",
    "a body that nobody waits for": BODY.replace(b"1000", b"999999999") + b"{",
}
"""What a slow caller sends, and no more."""


@contextmanager
def caller(api: httpx2.Client, sends: bytes, receive_buffer: int | None = None) -> Iterator[socket.socket]:
    """Connect to the service and send that."""
    with socket.socket() as connection:
        if receive_buffer is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        connection.connect((api.base_url.host, api.base_url.port))
        connection.settimeout(30)
        connection.sendall(sends)
        yield connection


def read_to_end(connection: socket.socket) -> bytes:
    """Return what the service sends until it closes the connection."""
    received = b""
    try:
        while part := connection.recv(65_536):
            received += part
    except ConnectionResetError:
        pass
    return received


@pytest.mark.parametrize("half", HALVES)
def test_half_a_request_ends_after_its_time_and_leaves_no_error(
    tmp_path: Path, half: str, capfd: pytest.CaptureFixture[str]
):
    with serving(api_settings(tmp_path, request_timeout_s=0.5)) as api, caller(api, HALVES[half]) as slow:
        read_to_end(slow)
        assert api.get("/healthz").status_code == 200
    assert "Traceback" not in capfd.readouterr().err


def test_an_answer_that_nobody_takes_ends_after_its_time(tmp_path: Path):
    """The answer is larger than what the two kernels keep of it."""
    settings = api_settings(tmp_path, request_timeout_s=0.5)
    source = {"kind": "inline", "samples": [{"text": "x" * 8_000_000}]}
    body = job_body(small_target(tmp_path / "model"), source=source)
    with server_and_client(settings) as (server, api):
        made = api.post("/extract", json=body).json()
        ask = f"GET /jobs/{made['id']}/request HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
        with caller(api, ask, receive_buffer=4096):
            wait_until(lambda: len(server.server_state.connections) == 2)
            wait_until(lambda: len(server.server_state.connections) < 2)


@pytest.mark.slow
def test_a_stream_outlives_the_time_of_a_request_and_what_comes_after_it_does_not(tmp_path: Path):
    """1. Its caller takes it all, then sends half a request. 2. The caller of another takes no more of it."""
    settings = api_settings(tmp_path, request_timeout_s=0.5)
    with server_and_client(settings) as (server, api), stored(settings) as store:
        server.servers[0].sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        body = job_body(small_target(tmp_path / "model"))
        ids = [api.post("/extract", json=body).json()["id"] for _ in range(2)]
        asks = [f"GET /jobs/{job}/events HTTP/1.1\r\nHost: localhost\r\n\r\n".encode() for job in ids]
        with caller(api, asks[0]) as taker, caller(api, asks[1], receive_buffer=4096):
            with caller(api, b"GET") as younger:
                read_to_end(younger)
            store.write(jobs.cancel, ids[0])
            taken = b""
            while not taken.endswith(b"0\r\n\r\n"):
                taken += taker.recv(65_536)
            assert b"cancelled" in taken
            taker.sendall(b"GET /jobs")
            read_to_end(taker)
            for priority in range(400):
                store.write(jobs.set_priority, ids[1], priority % 100)
            wait_until(lambda: not any(is_streaming(one) for one in server.server_state.connections))


def is_streaming(connection: Any) -> bool:
    return connection.cycle is not None and not connection.cycle.response_complete


CHUNKED = b"POST /extract HTTP/1.1\r\nHost: localhost\r\n" + JSON + b"\r\nTransfer-Encoding: chunked\r\n\r\n"
FREE_PARTS = FREE_BYTES // LEAST_PART_BYTES
COSTLY = {
    "one-byte chunks": CHUNKED + b"1\r\n \r\n" * 2 * FREE_PARTS,
    "requests ahead of answers": b"GET /jobs HTTP/1.1\r\nHost: localhost\r\n\r\n" * 5000,
    "many headers": b"GET /jobs HTTP/1.1\r\n" + b"a: b\r\n" * 2 * MAX_HEADERS,
    "a long header": b"GET /jobs HTTP/1.1\r\nX: " + b"x" * 16 * MAX_HEAD_BYTES,
    "a long trailer": CHUNKED + b"1\r\n \r\n0\r\nX: " + b"x" * 16 * MAX_HEAD_BYTES,
    "a long trailer without a body": CHUNKED + b"0\r\nX: " + b"x" * 16 * MAX_HEAD_BYTES,
    "a long name of a chunk": CHUNKED + b"1;x=" + b"x" * 16 * MAX_HEAD_BYTES,
    "a length beside chunks": CHUNKED.replace(
        b"\r\n\r\n", b"\r\nContent-Length: 2\r\n\r\n2\r\n{}\r\n0\r\n\r\n"
    ),
}
"""What would cost the event loop much and its sender little, or is read in two ways."""


@pytest.mark.slow
@pytest.mark.parametrize("form", COSTLY)
def test_a_request_that_costs_more_than_it_says_closes_its_connection(tmp_path: Path, form: str):
    with serving(api_settings(tmp_path)) as api, socket.socket() as connection:
        connection.connect((api.base_url.host, api.base_url.port))
        connection.settimeout(10)
        with suppress(ConnectionError):
            connection.sendall(COSTLY[form])
        assert read_to_end(connection).count(b"HTTP/1.1 ") <= 2
        assert api.get("/healthz").status_code == 200


def test_a_key_in_a_trailer_is_not_taken(tmp_path: Path):
    (tmp_path / "admin").write_text("a" * 32)
    sent = CHUNKED + b"2\r\n{}\r\n0\r\nAuthorization: Bearer " + b"a" * 32 + b"\r\n\r\n"
    settings = api_settings(tmp_path, admin_key_file=tmp_path / "admin")
    with serving(settings) as api, caller(api, sent) as sender:
        assert sender.recv(65_536).startswith(b"HTTP/1.1 401 ")


@pytest.mark.slow
@pytest.mark.parametrize("offer", ["h2c", "websocket", "h2c, websocket"])
def test_an_offer_of_another_protocol_is_ignored_however_the_request_is_split(tmp_path: Path, offer: str):
    """Java's client sends one with its first request."""
    more = (
        f"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: {offer}\r\nHTTP2-Settings: AAEAAEAAAA\r\n".encode()
    )
    post = b"POST /extract HTTP/1.1\r\nHost: localhost\r\n" + JSON + b"\r\n" + more
    forms = (
        b"GET /jobs HTTP/1.1\r\nHost: localhost\r\n" + more + b"\r\n",
        post + b"Content-Length: 2\r\n\r\n{}",
        post + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    )
    with serving(api_settings(tmp_path)) as api, socket.socket() as connection:
        connection.connect((api.base_url.host, api.base_url.port))
        connection.settimeout(10)
        for parts in (1, 7, 1000):
            for form, status in zip(forms, (b"200", b"422", b"422"), strict=True):
                for at in range(0, len(form), len(form) // parts + 1):
                    connection.sendall(form[at : at + len(form) // parts + 1])
                answer = b""
                while not answer.endswith((b"}", b"]")):
                    answer += (part := connection.recv(65536))
                    assert part, answer
                assert answer.startswith(b"HTTP/1.1 " + status), answer
                assert answer.count(b"HTTP/1.1 ") == 1


@pytest.mark.parametrize("offer", [b"", b"Connection: Upgrade\r\nUpgrade: h2c\r\n"], ids=["alone", "h2c"])
def test_a_connect_is_a_400(tmp_path: Path, offer: bytes):
    with serving(api_settings(tmp_path)) as api, socket.socket() as connection:
        connection.connect((api.base_url.host, api.base_url.port))
        connection.settimeout(10)
        connection.sendall(b"CONNECT other:80 HTTP/1.1\r\nHost: localhost\r\n" + offer + b"\r\n")
        assert read_to_end(connection).startswith(b"HTTP/1.1 400 ")


def test_small_parts_of_a_body_among_large_ones_are_taken(tmp_path: Path):
    body = json.dumps(job_body(small_target(tmp_path / "model"))).encode()
    parts = [body[at : at + 1] for at in range(len(body))]
    assert len(parts) < FREE_PARTS
    with serving(api_settings(tmp_path)) as api:
        for blanks in (0, 100_000):
            sent = (*parts, *([b" " * LEAST_PART_BYTES] * (blanks // LEAST_PART_BYTES)))
            answer = api.post("/extract", content=iter(sent), headers={"Content-Type": "application/json"})
            assert answer.status_code == 202, answer.text


def test_an_answer_before_the_body_is_read_closes_the_connection_and_arrives(tmp_path: Path):
    settings = api_settings(tmp_path, admin_key_file=tmp_path / "admin")
    (tmp_path / "admin").write_text("a" * 32)
    head = b"POST /extract HTTP/1.1\r\nHost: localhost\r\n" + JSON + b"\r\n"
    forms = (
        b"Content-Length: 8000000\r\n\r\n" + b" " * 8_000_000,
        b"Transfer-Encoding: chunked\r\n\r\n1\r\n ",
    )
    with serving(settings) as api:
        for form in forms:
            with socket.socket() as connection:
                connection.connect((api.base_url.host, api.base_url.port))
                connection.settimeout(10)
                with suppress(ConnectionError):
                    connection.sendall(head + form)
                answer = read_to_end(connection).lower()
                assert answer.startswith(b"http/1.1 401 "), answer
                assert b"\r\nconnection: close\r\n" in answer
        assert "connection" not in api.get("/jobs").headers, "a request without a body keeps it"


def test_methods_that_nobody_has_are_refused_and_not_counted(tmp_path: Path):
    with serving(api_settings(tmp_path)) as api:
        before = len(api.get("/metrics").text)
        for method in ("PROPFIND", "MKCOL", "REPORT"):
            problem = problem_of(api.request(method, "/jobs"), 405)
            assert "GET" in api.request(method, "/jobs").headers["allow"]
            assert problem.cure
        for number in range(50):
            with caller(api, f"X{number} /jobs HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()) as inventor:
                assert read_to_end(inventor).startswith(b"HTTP/1.1 400 ")
        assert len(api.get("/metrics").text) < before + 500


def test_the_newest_connection_is_not_the_one_that_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """More requests are worked on than connections may be open; the one that comes waits for nobody."""
    working, answered = threading.Semaphore(0), threading.Event()

    def slow(*given: Any) -> Any:
        working.release()
        answered.wait(30)

    monkeypatch.setattr(extract, "submit", slow)
    monkeypatch.setitem(TURNS, Turn.SUBMISSION, 16)
    body = job_body(small_target(tmp_path / "model"))
    with server_and_client(api_settings(tmp_path, max_connections=16)) as (server, api):
        state = cast(FastAPI, server.config.app).state
        state.submit_threads.total_tokens = 16
        monkeypatch.setattr(state.budget, "_bounds", lambda what: (100, 100))
        with ThreadPoolExecutor(16) as callers:
            posts = [callers.submit(httpx2.post, f"{api.base_url}/extract", json=body) for _ in range(16)]
            for _ in posts:
                assert working.acquire(timeout=30)
            try:
                assert httpx2.get(f"{api.base_url}/healthz", trust_env=False).status_code == 200
            finally:
                answered.set()
            for post in posts:
                post.exception()


@pytest.mark.slow
@pytest.mark.parametrize("half", ["nothing", "half a header"])
def test_callers_who_wait_are_closed_where_others_need_the_room(tmp_path: Path, half: str):
    """1. A stream is open. 2. Many slow callers come. 3. Probe and stream go on. Bodies: test_budget."""
    settings = api_settings(tmp_path, max_connections=16)
    with ExitStack() as open_things:
        server, api = open_things.enter_context(server_and_client(settings))
        made = api.post("/extract", json=job_body(small_target(tmp_path / "model"))).json()
        lines = open_things.enter_context(api.stream("GET", f"/jobs/{made['id']}/events")).iter_lines()
        next(lines)
        slow = [open_things.enter_context(caller(api, HALVES[half])) for _ in range(100)]
        for _ in range(20):
            assert httpx2.get(f"{api.base_url}/healthz", trust_env=False).status_code == 200
        assert len(server.server_state.connections) <= 16
        assert read_to_end(slow[0]) == b""
        assert api.post(f"/jobs/{made['id']}/cancel").json()["state"] == JobState.CANCELLED
        assert any("cancelled" in line for line in lines)


@pytest.mark.slow
def test_large_bodies_are_read_a_few_at_a_time_and_a_small_one_goes_past_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """1. Many large bodies come while reading one takes long. 2. A small one is answered before them."""
    at_once, seen, small_is_answered = 0, set(), threading.Event()

    def slowly(*arguments: Any) -> object:
        nonlocal at_once
        at_once += 1
        seen.add(at_once)
        small_is_answered.wait(30)
        at_once -= 1
        return read_apart(*arguments)

    monkeypatch.setattr(extract, "read_apart", slowly)
    model = small_target(tmp_path / "model")
    large = job_body(model, source={"kind": "inline", "samples": [{"text": "x" * SMALL_BODY_BYTES}]})
    with serving(api_settings(tmp_path)) as api, ThreadPoolExecutor(2 * AT_ONCE) as callers:
        posts = [callers.submit(api.post, "/extract", json=large) for _ in range(2 * AT_ONCE)]
        wait_until(lambda: at_once == AT_ONCE)
        try:
            assert api.post("/extract", json=job_body(model), timeout=10).status_code == 202
        finally:
            small_is_answered.set()
        assert [post.result().status_code for post in posts] == [202] * len(posts)
    assert max(seen) == AT_ONCE


@pytest.mark.parametrize(
    ("path", "module", "verb", "status"),
    [("/extract", extract, "submit", 202), ("/schedules?preview=true", scheduling, "preview", 200)],
)
def test_submissions_that_wait_hold_up_no_other_route(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, module: ModuleType, verb: str, status: int
):
    """More of them than the server has threads wait, as they do where the Hub is slow."""
    most, answered = 60, threading.Event()
    quick = getattr(module, verb)

    def slow(*given: Any) -> Any:
        answered.wait(60)
        return quick(*given)

    monkeypatch.setattr(module, verb, slow)
    (tmp_path / "samples.jsonl").write_text("{}")
    source = {"kind": "file", "path": str(tmp_path / "*.jsonl")}
    body = job_body(small_target(tmp_path / "model"), source=source)
    if module is scheduling:
        body = {"name": "nightly", "cron": "0 3 * * *", "request": body}
    with server_and_client(api_settings(tmp_path)) as (server, api), ThreadPoolExecutor(most) as callers:
        turns = cast(FastAPI, server.config.app).state.budget._all_turns[Turn.SUBMISSION]
        posts = [callers.submit(api.post, path, json=body, timeout=60) for _ in range(most)]
        try:
            wait_until(turns.locked)
            for other in ("/jobs", "/readyz"):
                assert api.get(other, timeout=10).status_code == 200
        finally:
            answered.set()
        assert {post.result().status_code for post in posts} == {status}


@pytest.mark.parametrize(
    ("soft", "hard", "most", "soft_after"),
    [(64, 64, 32, 64), (64, 4096, 1000, 2000), (4096, 4096, 1000, 4096)],
)
def test_connections_leave_files_for_everything_else(soft: int, hard: int, most: int, soft_after: int):
    code = "from resource import *; from service.api.connection import most_connections as most; "
    code += f"setrlimit(RLIMIT_NOFILE, ({soft}, {hard})); print(most(1000), getrlimit(RLIMIT_NOFILE)[0])"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert child.stdout.split() == [str(most), str(soft_after)]


@pytest.mark.parametrize(
    ("bound", "most"), [({"event_listeners": 3}, 3), ({"max_connections": 16}, 8)], ids=["caller", "all"]
)
def test_event_streams_are_bounded_and_one_that_ends_makes_room(
    tmp_path: Path, bound: dict[str, int], most: int
):
    with serving(api_settings(tmp_path, **bound)) as api, ExitStack() as streams:
        made = api.post("/extract", json=job_body(small_target(tmp_path / "model"))).json()
        ask = f"GET /jobs/{made['id']}/events HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()

        def status() -> bytes:
            return streams.enter_context(caller(api, ask)).recv(12)

        with caller(api, ask) as first:
            assert [first.recv(12), *(status() for _ in range(most - 1))] == [b"HTTP/1.1 200"] * most
            refused = api.get(f"/jobs/{made['id']}/events", timeout=10)
            assert problem_of(refused, 429).cure
            assert int(refused.headers["Retry-After"]) > 0
        wait_until(lambda: status() == b"HTTP/1.1 200")
