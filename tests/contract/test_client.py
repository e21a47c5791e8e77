"""`service.client`: every route has a method, and both clients do the same with it on a real service."""

import asyncio
import inspect
import json
import pydoc
import re
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest
from pydantic import ValidationError

from schemas.job import JobState
from schemas.request import ExtractRequest
from schemas.schedule import NewSchedule, ScheduleChange
from service.api.app import create_app
from service.client import AsyncQuarry, ProblemReceived, Quarry, clients
from service.client.clients import DEFAULT_SERVER
from service.client.problem import UNREACHABLE
from service.client.routes import Call, Pages, Routes
from service.errors import QuarryError
from service.store import Store
from tests.support.api import (
    answering,
    api_settings,
    complete,
    job_body,
    job_summary,
    serving,
    small_target,
    stored,
)
from tests.support.receiver import receiving

NOT_CALLED = {("get", "/jobs/{job_id}/events"), ("get", "/metrics")}
"""For browsers and for Prometheus."""
METHODS = dict(inspect.getmembers(Routes, inspect.isfunction))
Ask = Callable[..., Any]


class Recorder(Routes):
    """A client that returns what it would send."""

    def close(self) -> None:
        """Mark this client as one that blocks."""

    def send(self, call: Call[Any]) -> Call[Any]:
        return call

    def items(self, pages: Pages[Any]) -> Call[Any]:
        return pages.first


def sent(name: str) -> Call[Any]:
    """Return the call of a method with some argument in every place."""
    made: dict[str, Any] = {}
    for parameter in list(inspect.signature(METHODS[name]).parameters.values())[1:]:
        if parameter.default is inspect.Parameter.empty:
            text = str(parameter.annotation)
            made[parameter.name] = "x" if parameter.annotation is str else 1 if "int" in text else {}
    return getattr(Recorder(), name)(**made)


def test_every_route_has_a_method_of_both_clients(tmp_path: Path):
    paths = create_app(api_settings(tmp_path)).openapi()["paths"]
    routes = {(method, path) for path, methods in paths.items() for method in methods}
    shapes = {(method, re.sub(r"{.*?}", "x", path)): (method, path) for method, path in routes}
    called = {shapes[call.method.lower(), call.path] for call in map(sent, METHODS)}
    assert routes - called == NOT_CALLED
    assert issubclass(Quarry, Routes) and issubclass(AsyncQuarry, Routes)


def test_a_method_is_documented_where_it_is_asked_for():
    text = pydoc.plain(pydoc.render_doc(AsyncQuarry(DEFAULT_SERVER).set_priority))
    assert "set_priority(job_id: str, priority: int)" in text
    assert "jobs with a higher one run first" in text


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Store, Path]]:
    """A server's address, its store, and a target that it may load."""
    folder = tmp_path_factory.mktemp("service")
    settings = api_settings(folder)
    with serving(settings) as api, stored(settings) as store:
        yield str(api.base_url), store, small_target(folder / "model")


@pytest.fixture(params=[Quarry, AsyncQuarry])
def ask(request: pytest.FixtureRequest, service: tuple[str, Store, Path]) -> Iterator[Ask]:
    """Call a method of either client by its name; iterators are read to their end."""

    async def every(items: Any) -> list[Any]:
        return [item async for item in items]

    async def value(answer: Any) -> Any:
        return await answer

    with asyncio.Runner() as runner:
        client = request.param(service[0])

        def of(name: str, *arguments: Any, **options: Any) -> Any:
            answer = getattr(client, name)(*arguments, **options)
            if hasattr(answer, "__aiter__"):
                return runner.run(every(answer))
            if inspect.isawaitable(answer):
                return runner.run(value(answer))
            return list(answer) if inspect.isgenerator(answer) else answer

        yield of
        of("close")


def test_a_job_from_its_submission_to_its_files(ask: Ask, service: tuple[str, Store, Path], tmp_path: Path):
    """Submitted twice under a key, changed, followed to its end, and read."""
    _, store, model = service
    request = ExtractRequest.model_validate(job_body(model))
    key = f"once-{ask.__hash__()}"
    job = ask("submit", request, key=key, priority=7)
    assert (job.state, job.priority) == (JobState.QUEUED, 7)
    assert ask("submit", job_body(model), key=key).id == job.id
    assert ask("submit", request).id != job.id
    assert ask("request", job.id).model == str(model)
    with pytest.raises(ProblemReceived, match="tokenizer") as refused:
        ask("estimate", request)  # the target has none
    assert refused.value.problem.field == "model"
    assert ask("set_priority", job.id, 3).priority == 3
    for other in ask("jobs", state=JobState.QUEUED):
        ask("cancel", other.id)
    assert ask("resume", job.id).state is JobState.QUEUED
    complete(store, job.id, num_units=3, rejects=1500)
    assert [one.state for one in ask("follow", job.id)] == [JobState.COMPLETED]
    assert len(ask("rejects", job.id)) == 1500
    page = ask("unit_page", job.id, limit=2)
    assert [unit.unit for unit in page.units] == [0, 1]
    assert [unit.unit for unit in ask("units", job.id)] == [0, 1, 2]
    data = Path(str(page.folder), "data")
    data.mkdir(parents=True)
    (data / "a file").write_bytes(bytes(range(100)))
    part = ask("file", job.id, "data/a file", offset=90, num_bytes=20)
    assert (part.content, part.num_bytes) == (bytes(range(90, 100)), 100)
    ask("download", job.id, "data/a file", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == bytes(range(100))
    ask("delete", job.id, dataset=True)
    with pytest.raises(ProblemReceived) as gone:
        ask("job", job.id)
    assert (gone.value.problem.status, gone.value.problem.field) == (404, "job_id")


def test_a_file_is_downloaded_in_pieces(
    ask: Ask, service: tuple[str, Store, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(clients, "PIECE_BYTES", 33)
    job = ask("submit", job_body(service[2]))
    folder = Path(str(ask("unit_page", job.id).folder))
    folder.mkdir(parents=True)
    for length in (33, 100):
        (folder / "a").write_bytes(bytes(range(length)))
        ask("download", job.id, "a", tmp_path / "copy")
        assert (tmp_path / "copy").read_bytes() == bytes(range(length))
    with pytest.raises(ProblemReceived):
        ask("download", job.id, "missing", tmp_path / "copy")
    with Quarry(service[0]) as quarry, ThreadPoolExecutor() as threads:  # to one path: each comes whole
        list(threads.map(lambda _: quarry.download(job.id, "a", tmp_path / "copy"), range(8)))
    assert [file.read_bytes() for file in tmp_path.iterdir()] == [bytes(range(100))]
    for path in ("../../secret", "", "data//a"):
        with pytest.raises(ProblemReceived, match="names nothing"):
            ask("download", job.id, path, tmp_path / "copy")


def test_a_key_that_could_not_be_sent_is_not_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with Quarry(key=" qk_word\n") as quarry:
        assert quarry._http.headers["Authorization"] == "Bearer qk_word"
    for client in (Quarry, AsyncQuarry):
        with pytest.raises(ProblemReceived, match="API key") as refused:
            client(key="qk_secret word")
        assert "secret" not in str(refused.value)
    (tmp_path / "key").write_bytes(b"secret\xff\0")
    monkeypatch.setenv("QUARRY_KEY_FILE", str(tmp_path / "key"))
    with pytest.raises(ProblemReceived, match="API key") as refused:
        Quarry()
    assert "secret" not in str(refused.value)


def test_a_key_that_is_given_comes_before_one_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "key").write_text("of-the-file\n")
    monkeypatch.setenv("QUARRY_KEY_FILE", str(tmp_path / "key"))
    for variable, argument, sent in (
        ("of-the-variable", None, "of-the-variable"),
        ("", None, "of-the-file"),
        ("of-the-variable", "given", "given"),
    ):
        monkeypatch.setenv("QUARRY_KEY", variable)
        with Quarry(key=argument) as quarry:
            assert quarry._http.headers["Authorization"] == f"Bearer {sent}"
    monkeypatch.setenv("QUARRY_KEY_FILE", str(tmp_path / "not-there"))
    Quarry().close()
    monkeypatch.delenv("QUARRY_KEY")
    with pytest.raises(ProblemReceived, match="not-there cannot be read") as refused:
        Quarry()
    assert refused.value.problem.field == "QUARRY_KEY_FILE"


def test_a_private_authority_is_trusted_by_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    found = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda _, *rest, **more: found("127.0.0.1", *rest, **more))

    async def ask(server: str) -> None:
        async with AsyncQuarry(server) as quarry:
            await quarry.health()

    def said(server: str) -> set[tuple[str, bool]]:
        with pytest.raises(ProblemReceived) as blocking, Quarry(server) as quarry:
            quarry.health()
        with pytest.raises(ProblemReceived) as awaiting:
            asyncio.run(ask(server))
        problems = (blocking.value.problem, awaiting.value.problem)
        return {(problem.type, "SSL_CERT_FILE" in str(problem.cure)) for problem in problems}

    with receiving(tmp_path) as (server, certificate):
        assert said(server.url) == {(UNREACHABLE, True)}
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:1")
        assert said(server.url) == {("urn:quarry:unexpected-answer", False)}


def test_a_schedule_from_its_making_to_its_end(ask: Ask, service: tuple[str, Store, Path]):
    request = {"model": str(service[2]), "layers": [1, 2], "source": {"kind": "posted"}}
    new = {"name": "nightly", "cron": "0 3 * * *", "time_zone": "UTC", "request": request}
    assert len(ask("add_schedule", new, preview=True).next_slots) == 5
    assert ask("schedules") == []
    made = ask("add_schedule", new)
    assert ask("schedules") == [made] == [ask("schedule", "nightly")]
    assert ask("schedule_request", "nightly").source.kind == "posted"
    assert ask("post_samples", "nightly", [{"text": "one"}, {"text": "two"}]).samples == 2
    assert ask("change_schedule", "nightly", ScheduleChange(paused=True)).state == "paused"
    run = ask("run_schedule", "nightly")
    assert [one.job_id for one in ask("runs", "nightly")] == [run.job_id]
    ask("delete_schedule", "nightly")
    with pytest.raises(ProblemReceived, match="nightly"):
        ask("schedule", "nightly")


def test_an_unreadable_schedule_is_named_behind_the_readable_ones_of_all_pages():
    nightly = {"request": {"model": "org/model", "source": {"kind": "posted"}}, "cron": "0 3 * * *"}
    rules = NewSchedule.model_validate(nightly | {"name": "b"}).rules().model_dump(mode="json")
    view = rules | {
        "state": "active",
        "next_slots": [],
        "failing": False,
        "created_at": "2026-01-01T00:00:00Z",
    }
    unreadable = {"name": "a", "problem": QuarryError("that of a").problem().model_dump()}
    pages = {
        "/schedules?limit=200": {
            "schedules": [view | {"name": "b"}],
            "unreadable": [unreadable],
            "next_after": "b",
        },
        "/schedules?limit=200&after=b": {"schedules": [view | {"name": "c"}]},
    }
    names: list[str] = []

    async def awaited(server: str) -> None:
        async with AsyncQuarry(server) as quarry:
            async for schedule in quarry.schedules():
                names.append(schedule.name)

    with answering({path: (200, page) for path, page in pages.items()}) as server:
        with Quarry(server) as quarry, pytest.raises(ProblemReceived, match="that of a"):
            names.extend(schedule.name for schedule in quarry.schedules())
        with pytest.raises(ProblemReceived, match="that of a"):
            asyncio.run(awaited(server))
    assert names == ["b", "c"] * 2


NEWER = job_summary().model_dump(mode="json") | {"not_known": {"yet": 1}}
WORKER = {"name": "a", "pid": 1, "alive_until": NEWER["created_at"], "roles": ["capture", "judge"]}
HOST = {"id": "h", "name": "node", "is_home": True, "is_lost": False, "seen_at": NEWER["created_at"]}
HOST |= {"units_to_store": 0, "bytes_to_store": 0, "workers": [WORKER]}
ANSWERS = {
    "/jobs/newer": (200, NEWER),
    "/jobs?limit=200": (200, {"jobs": [NEWER | {"state": "archived", "source_kind": "bucket"}, NEWER]}),
    "/workers": (200, {"hosts": [HOST]}),
    "/jobs/older": (200, {"id": "j-1"}),
    "/jobs/newer/request": (200, {"model": "a/b", "source": {"kind": "bucket", "url": "s3://a"}}),
    "/jobs/between": (502, "<html>Bad gateway</html>"),
}


def test_a_newer_service_is_understood():
    """Fields that are not known are left out, and names that are not known are kept."""
    with answering(ANSWERS) as server, Quarry(server) as quarry:
        assert quarry.job("newer").state is JobState.RUNNING
        archived, running = quarry.jobs()
        assert (archived.state, archived.state.value, archived.source_kind) == (
            "archived",
            "archived",
            "bucket",
        )
        assert isinstance(archived.state, JobState) and archived.state not in set(JobState)
        assert json.loads(archived.model_dump_json())["state"] == "archived"
        assert running.state is JobState.RUNNING
        assert [one.roles for one in quarry.workers().hosts[0].workers] == [("capture", "judge")]


@pytest.mark.parametrize(
    ("ask_for", "said"),
    [
        (
            lambda quarry: quarry.job("older"),
            "id: String should match pattern '^j-[0-9a-f]{16}$'; it sent 'j-1'",
        ),
        (lambda quarry: quarry.request("newer"), "source: Input tag 'bucket'"),
        (lambda quarry: quarry.job("between"), "502"),
    ],
)
def test_an_answer_that_cannot_be_read_is_named_by_field_and_value(ask_for: Ask, said: str):
    with answering(ANSWERS) as server, Quarry(server) as quarry, pytest.raises(ProblemReceived) as refused:
        ask_for(quarry)
    problem = refused.value.problem
    assert (problem.status, "update this client" in str(problem.cure)) == (502, True)
    assert said in problem.detail


def test_a_name_that_is_not_known_is_refused_in_a_request():
    with pytest.raises(ValidationError, match="missed"):
        ScheduleChange.model_validate({"missed": "never"})


@pytest.mark.parametrize(
    "server", ["127.0.0.1:8642", "ftp://host", "http://", "http://[::1", "x y", "http://\0"]
)
def test_what_is_no_url_is_refused_before_anything_is_sent(server: str):
    for client in (Quarry, AsyncQuarry):
        with pytest.raises(ProblemReceived, match="is not the URL of a service") as refused:
            client(server)
        assert "http://127.0.0.1:8642" in str(refused.value.problem.cure)


def test_a_host_that_no_name_server_takes_is_a_service_that_does_not_answer():
    with Quarry(f"http://{'a' * 100}.example") as quarry, pytest.raises(ProblemReceived) as refused:
        quarry.health()
    assert refused.value.problem.type == UNREACHABLE


@pytest.mark.parametrize("key", ["", " ", "nightly ", "n\u00e4chtlich", "two\nlines", "\udcff"])
def test_an_idempotency_key_that_cannot_be_sent_is_refused_by_name(key: str):
    for client in (Quarry("http://127.0.0.1:9"), AsyncQuarry("http://127.0.0.1:9")):
        with pytest.raises(ProblemReceived, match="is not an idempotency key") as refused:
            client.submit({}, key=key)
        assert (refused.value.problem.field, refused.value.problem.status) == ("key", 422)


@pytest.mark.parametrize("said", [{}, {"Content-Range": "bytes 0-3/*"}, {"Content-Range": "bytes 5-8/100"}])
def test_a_part_of_another_range_is_refused(said: dict[str, str]):
    call = Recorder().file("x", "data/a", num_bytes=4)
    asked = httpx2.Request(call.method, "http://127.0.0.1/", **call.options)
    with pytest.raises(ProblemReceived, match="another range"):
        call.read(httpx2.Response(206, headers=said, content=b"abcd", request=asked))


def test_a_name_that_is_no_text_is_a_name():
    with pytest.raises(ProblemReceived, match=r"127\.0\.0\.1:9"):
        Quarry("http://127.0.0.1:9").job("\udcff")
