"""What one owner takes of the service: above a share it is refused or waits, and others are served."""

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import httpx2
import pytest
from fastapi import FastAPI

from schemas.job import JobState
from service.api.routes import extract, jobs as job_routes
from service.control.budget import BODIES_HELD, TURNS, Budget, Turn
from service.plan.child.process import Child
from service.settings import Settings
from service.store import commits, jobs
from tests.support.api import (
    Looks,
    api_settings,
    complete,
    job_body,
    problem_of,
    server_and_client,
    small_target,
    stored,
)
from tests.support.waiting import wait_until

ADMIN = {"Authorization": f"Bearer {'a' * 40}"}


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    (tmp_path / "admin").write_text("a" * 40)
    return api_settings(tmp_path, admin_key_file=tmp_path / "admin", max_body_bytes=2**20)


@pytest.fixture
def served(settings: Settings) -> Iterator[tuple[FastAPI, httpx2.Client]]:
    with server_and_client(settings) as (server, api):
        # What the kernel keeps of an answer is not kept here.
        server.servers[0].sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        limits = httpx2.Limits(max_connections=None)
        with httpx2.Client(base_url=api.base_url, timeout=30, trust_env=False, limits=limits) as client:
            yield cast(FastAPI, server.config.app), client


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return small_target(tmp_path / "model")


def key_of(api: httpx2.Client, name: str, model: Path) -> dict[str, str]:
    """Make a key; return the header that sends it."""
    new = {"name": name, "scopes": ["jobs:read", "jobs:write"], "model_roots": [str(model.parent)]}
    return {"Authorization": f"Bearer {api.post('/keys', json=new, headers=ADMIN).json()['key']}"}


def revoke(api: httpx2.Client) -> None:
    """Revoke the newest key."""
    key_id = api.get("/keys", headers=ADMIN).json()["keys"][0]["id"]
    api.delete(f"/keys/{key_id}", headers=ADMIN).raise_for_status()


def large(model: Path) -> dict[str, Any]:
    return job_body(model, source={"kind": "inline", "samples": [{"text": "x" * 900_000}]})


def waiting_caller(api: httpx2.Client, receive_buffer: int | None = None) -> socket.socket:
    """Connect by a socket that reads nothing by itself."""
    connection = socket.socket()
    if receive_buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.connect((api.base_url.host, api.base_url.port))
    connection.settimeout(30)
    return connection


@pytest.mark.slow
@pytest.mark.parametrize("body_of", [job_body, large], ids=["small", "large"])
def test_submissions_that_take_long_hold_up_their_owner_alone(
    served: tuple[FastAPI, httpx2.Client], model: Path, monkeypatch: pytest.MonkeyPatch, body_of: Any
):
    """1. A sends more than are worked on at once, and each takes long. 2. B's is answered meanwhile."""
    _, api = served
    (a, b), answered = (key_of(api, name, model) for name in ("team-a", "team-b")), threading.Event()
    quick, begun, most = extract.submit, threading.Semaphore(0), TURNS[Turn.LARGE_BODY]

    def slow(*given: Any) -> Any:
        if given[0].request.chat_template == "slow":
            begun.release()
            answered.wait(60)
        return quick(*given)

    monkeypatch.setattr(extract, "submit", slow)
    sent = body_of(model) | {"chat_template": "slow"}
    with ThreadPoolExecutor(2 * most) as callers:
        posts = [
            callers.submit(api.post, "/extract", json=sent, headers=a, timeout=60) for _ in range(2 * most)
        ]
        try:
            for _ in range(most // 2):
                assert begun.acquire(timeout=30)
            assert api.post("/extract", json=body_of(model), headers=b, timeout=10).status_code == 202
        finally:
            answered.set()
        assert {post.result().status_code for post in posts} == {202}


def test_models_that_take_long_to_check_hold_up_their_owner_alone(
    served: tuple[FastAPI, httpx2.Client], model: Path, monkeypatch: pytest.MonkeyPatch
):
    """1. A submits what takes a child for as long as it may. 2. B's is checked meanwhile."""
    _, api = served
    (a, b), answered = (key_of(api, name, model) for name in ("team-a", "team-b")), threading.Event()
    checked, begun = Child.checked, threading.Semaphore(0)

    def slow(child: Child) -> None:
        if child._task.request.chat_template == "slow":
            begun.release()
            answered.wait(60)
        checked(child)

    monkeypatch.setattr(Child, "checked", slow)
    body = job_body(model)
    with ThreadPoolExecutor(4) as callers:
        posts = [
            callers.submit(api.post, "/extract", json=body | {"chat_template": "slow"}, headers=a, timeout=60)
            for _ in range(4)
        ]
        try:
            assert begun.acquire(timeout=30)
            assert api.post("/extract", json=body, headers=b, timeout=60).status_code == 202
            assert not any(post.done() for post in posts)
        finally:
            answered.set()
        assert {post.result().status_code for post in posts} == {202}


def test_an_owner_makes_one_estimate_and_leaves_another_to_others(
    served: tuple[FastAPI, httpx2.Client], model: Path, monkeypatch: pytest.MonkeyPatch
):
    from service.plan import estimate as module

    _, api = served
    quick, begun, answered = module.estimate_request, threading.Semaphore(0), threading.Event()
    a, b = (key_of(api, name, model) for name in ("team-a", "team-b"))

    def slow(*given: Any) -> Any:
        begun.release()
        answered.wait(60)
        return quick(*given)

    monkeypatch.setattr(module, "estimate_request", slow)
    body = job_body(model, source={"kind": "inline", "samples": [{"token_ids": [1, 2]}]})
    with ThreadPoolExecutor(2) as callers:
        endless = callers.submit(api.post, "/estimate", json=body, headers=a)
        assert begun.acquire(timeout=30)
        try:
            refused = api.post("/estimate", json=body, headers=a)
            problem = problem_of(refused, 429)
            assert (problem.field, bool(problem.cure)) == ("Authorization", True)
            assert int(refused.headers["Retry-After"]) > 0
            others = callers.submit(api.post, "/estimate", json=body, headers=b)
            assert begun.acquire(timeout=30)
        finally:
            answered.set()
        assert endless.result().status_code == others.result().status_code


def test_requests_in_work_of_one_owner_leave_room_for_others(
    served: tuple[FastAPI, httpx2.Client], model: Path
):
    """Their bodies do not come; each is in work while it is waited for."""
    app, api = served
    budget = cast(Budget, app.state.budget)
    budget.connections = 64
    a, b = (key_of(api, name, model) for name in ("team-a", "team-b"))
    half = f"POST /extract HTTP/1.1\r\nHost: localhost\r\nAuthorization: {a['Authorization']}\r\n"
    half += "Content-Type: application/json\r\nContent-Length: 100\r\nExpect: 100-continue\r\n\r\n"
    with ExitStack() as waiting:
        for _ in range(4):
            connection = waiting.enter_context(
                socket.create_connection((api.base_url.host, api.base_url.port), 30)
            )
            connection.sendall(half.encode())
            assert b"100 Continue" in connection.recv(1000)
        assert problem_of(api.get("/jobs", headers=a), 429).field == "Authorization"
        assert api.get("/jobs", headers=b).status_code == 200
    for _ in range(1000):
        if api.get("/jobs", headers=a).status_code == 200:
            break
    else:
        pytest.fail("what ended still counts")


def test_bodies_and_answers_of_one_owner_are_bounded_in_bytes(
    served: tuple[FastAPI, httpx2.Client], settings: Settings, model: Path
):
    """1. A takes no answer to many requests for a large one. 2. A gets no more of them; B does."""
    _, api = served
    a, b = (key_of(api, name, model) for name in ("team-a", "team-b"))
    job_a, job_b = (api.post("/extract", json=large(model), headers=key).json()["id"] for key in (a, b))
    ask = f"GET /jobs/{job_a}/request HTTP/1.1\r\nHost: localhost\r\n"
    ask += f"Authorization: {a['Authorization']}\r\n\r\n"
    statuses = []
    with ExitStack() as deaf:
        for _ in range(BODIES_HELD):
            connection = deaf.enter_context(waiting_caller(api, receive_buffer=4096))
            connection.sendall(ask.encode())
            statuses.append(connection.recv(12)[9:])
        share = settings.max_body_bytes * BODIES_HELD // 4 // 900_000
        assert statuses == [b"200"] * share + [b"429"] * (BODIES_HELD - share)
        assert problem_of(api.get(f"/jobs/{job_a}/request", headers=a), 429).field == "Authorization"
        problem_of(api.post("/extract", json=large(model), headers=a), 429)
        assert api.get(f"/jobs/{job_a}", headers=a).status_code == 200
        assert len(api.get(f"/jobs/{job_b}/request", headers=b).content) > 900_000
        assert api.post("/extract", json=large(model), headers=b).status_code == 202


def test_pages_of_rejects_of_one_owner_are_made_few_at_a_time(
    served: tuple[FastAPI, httpx2.Client], model: Path, monkeypatch: pytest.MonkeyPatch
):
    """A's requests wait for each other; B's goes past them."""
    _, api = served
    a, b = (key_of(api, name, model) for name in ("team-a", "team-b"))
    jobs_of = [api.post("/extract", json=job_body(model), headers=key).json()["id"] for key in (a, b)]
    begun, may_end, quick = [], threading.Event(), commits.rejects

    def slow(tx: Any, job_id: str, **page: Any) -> Any:
        begun.append(job_id)
        assert job_id == jobs_of[1] or may_end.wait(60)
        return quick(tx, job_id, **page)

    monkeypatch.setattr(commits, "rejects", slow)
    with ThreadPoolExecutor() as callers:
        asked = [callers.submit(api.get, f"/jobs/{jobs_of[0]}/rejects", headers=a) for _ in range(4)]
        wait_until(lambda: len(begun) == TURNS[Turn.DOWNLOAD] // 2)
        assert api.get(f"/jobs/{jobs_of[1]}/rejects", headers=b).json() == {"rejects": [], "next_after": None}
        assert begun.count(jobs_of[0]) == TURNS[Turn.DOWNLOAD] // 2
        may_end.set()
        assert {one.result().status_code for one in asked} == {200}


def test_bodies_that_are_half_sent_are_bounded_in_bytes(served: tuple[FastAPI, httpx2.Client], model: Path):
    _, api = served
    a, b = (key_of(api, name, model) for name in ("team-a", "team-b"))
    half = f"POST /extract HTTP/1.1\r\nHost: localhost\r\nAuthorization: {a['Authorization']}\r\n"
    half += "Content-Type: application/json\r\nContent-Length: 1000000\r\nExpect: 100-continue\r\n\r\n"
    with ExitStack() as slow:
        answers = []
        for _ in range(BODIES_HELD):
            connection = slow.enter_context(waiting_caller(api))
            connection.sendall(half.encode())
            answers.append(connection.recv(12)[9:])
        assert answers == [b"100"] * (BODIES_HELD // 4) + [b"429"] * (BODIES_HELD // 4 * 3)
        assert api.post("/extract", json=large(model), headers=b).status_code == 202


@pytest.mark.parametrize(("lasting", "quick"), [("units?wait=60", "units"), ("files/large", "files/none")])
def test_requests_that_last_for_long_are_not_requests_in_work(
    served: tuple[FastAPI, httpx2.Client],
    settings: Settings,
    model: Path,
    lasting: str,
    quick: str,
    monkeypatch: pytest.MonkeyPatch,
):
    """1. An owner waits for units, or takes no file, as often as it may. 2. Others of its requests go on.

    3. It hangs up, and may do so again.
    """
    monkeypatch.setattr(job_routes, "GONE_S", 0.1)
    app, api = served
    budget = cast(Budget, app.state.budget)
    budget.connections, budget._settings = 64, settings.model_copy(update={"event_listeners": 3})
    key = key_of(api, "team-a", model)
    made = f"/jobs/{api.post('/extract', json=job_body(model), headers=key).json()['id']}"
    folder = settings.dataset_dir(made.removeprefix("/jobs/"))
    folder.mkdir(parents=True)
    (folder / "large").write_bytes(bytes(2**20))
    ask = f"GET {made}/{lasting} HTTP/1.1\r\nHost: localhost\r\nAuthorization: {key['Authorization']}\r\n\r\n"
    with ExitStack() as waiting:
        for _ in range(1000):
            waiting.enter_context(waiting_caller(api, receive_buffer=4096)).sendall(ask.encode())
            if (refused := api.get(f"{made}/{quick}", headers=key)).status_code == 429:
                break
        assert problem_of(refused, 429).field == "Authorization"
        assert api.get(made, headers=key).status_code == 200
    wait_until(lambda: api.get(f"{made}/{quick}", headers=key).status_code != 429)


def test_who_waits_for_units_hears_nothing_once_the_key_is_revoked(
    served: tuple[FastAPI, httpx2.Client], settings: Settings, model: Path, monkeypatch: pytest.MonkeyPatch
):
    _, api = served
    key = key_of(api, "team-a", model)
    made = api.post("/extract", json=job_body(model), headers=key).json()
    looks = Looks(monkeypatch)
    with ThreadPoolExecutor(1) as beside, stored(settings) as store:
        coming = beside.submit(api.get, f"/jobs/{made['id']}/units?wait=60", headers=key, timeout=60)
        assert looks.begun.acquire(timeout=30)
        revoke(api)
        complete(store, made["id"], num_units=1)
        assert problem_of(coming.result(), 401).field == "Authorization"


def test_a_stream_ends_once_its_key_is_revoked(
    served: tuple[FastAPI, httpx2.Client], settings: Settings, model: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(job_routes, "ASK_AGAIN_S", 0.0)
    _, api = served
    key = key_of(api, "team-a", model)
    made = api.post("/extract", json=job_body(model), headers=key).json()
    with api.stream("GET", f"/jobs/{made['id']}/events", headers=key) as answer, stored(settings) as store:
        lines = answer.iter_lines()
        while not next(lines).startswith("data:"):
            pass
        revoke(api)
        store.write(jobs.set_priority, made["id"], 7)
        store.write(jobs.cancel, made["id"])
        rest = "".join(lines)
    assert JobState.CANCELLED not in rest
    assert "data:" not in rest


def test_a_stream_of_a_silent_job_ends_once_its_key_is_revoked(
    served: tuple[FastAPI, httpx2.Client], model: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(job_routes, "QUIET_S", 0.1)
    _, api = served
    key = key_of(api, "team-a", model)
    made = api.post("/extract", json=job_body(model), headers=key).json()
    with api.stream("GET", f"/jobs/{made['id']}/events", headers=key) as answer:
        lines = answer.iter_lines()
        while not next(lines).startswith("data:"):
            pass
        revoke(api)
        assert "data:" not in "".join(lines)


def test_the_document_that_anybody_may_ask_for_is_made_at_the_start(
    served: tuple[FastAPI, httpx2.Client],
):
    assert served[0].openapi_schema is not None
