"""`service.client`: every route has a method, and both clients do the same with it on a real service."""

import asyncio
import inspect
import json
import re
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from schemas.job import JobState
from schemas.request import ExtractRequest
from schemas.schedule import ScheduleChange
from service.api.app import create_app
from service.client import AsyncQuarry, ProblemReceived, Quarry, calls, clients
from service.client.calls import Call, Pages
from service.store import Store
from tests.support.api import (
    api_settings,
    complete,
    job_body,
    job_summary,
    serving,
    small_target,
    stored,
)

NOT_CALLED = {("get", "/jobs/{job_id}/events"), ("get", "/metrics")}
"""For browsers and for Prometheus."""
ROUTES = {
    name: function
    for name, function in inspect.getmembers(calls, inspect.isfunction)
    if function.__module__ == calls.__name__ and not name.startswith("_")
}
Ask = Callable[..., Any]


def sent(function: Callable[..., Call[Any] | Pages[Any]]) -> Call[Any]:
    """Return a call with some argument in every place."""
    made: dict[str, Any] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.default is inspect.Parameter.empty:
            text = str(parameter.annotation)
            made[name] = "x" if parameter.annotation is str else 1 if "int" in text else {}
    call = function(**made)
    return call.first if isinstance(call, Pages) else call


def test_every_route_has_a_method_of_both_clients(tmp_path: Path):
    paths = create_app(api_settings(tmp_path)).openapi()["paths"]
    routes = {(method, path) for path, methods in paths.items() for method in methods}
    shapes = {(method, re.sub(r"{.*?}", "x", path)): (method, path) for method, path in routes}
    called = {shapes[call.method.lower(), call.path] for call in map(sent, ROUTES.values())}
    assert routes - called == NOT_CALLED
    for client in (Quarry, AsyncQuarry):
        assert all(getattr(client, name).__doc__ == function.__doc__ for name, function in ROUTES.items())


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
    (folder / "a").write_bytes(bytes(range(100)))
    ask("download", job.id, "a", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == bytes(range(100))
    with pytest.raises(ProblemReceived):
        ask("download", job.id, "missing", tmp_path / "copy")
    assert [file.read_bytes() for file in tmp_path.iterdir()] == [bytes(range(100))]
    with pytest.raises(ValueError, match="names"):
        ask("download", job.id, "../../secret", tmp_path / "copy")


def test_a_key_that_could_not_be_sent_is_not_quoted():
    with Quarry(key=" qk_word\n") as quarry:
        assert quarry._http.headers["Authorization"] == "Bearer qk_word"
    for client in (Quarry, AsyncQuarry):
        with pytest.raises(ProblemReceived, match="API key") as refused:
            client(key="qk_secret word")
        assert "secret" not in str(refused.value)


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


ANSWERS = {
    "/jobs/newer": (200, job_summary().model_dump(mode="json") | {"not_known": {"yet": 1}}),
    "/jobs/older": (200, {"id": "j-1"}),
    "/jobs/between": (502, "<html>Bad gateway</html>"),
}


class Another(BaseHTTPRequestHandler):
    """Answers what another version, or something between, would."""

    def do_GET(self) -> None:
        status, answer = ANSWERS[self.path]
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def test_a_newer_service_is_understood_and_what_is_not_quarry_is_named():
    with ThreadingHTTPServer(("127.0.0.1", 0), Another) as server:
        Thread(target=server.serve_forever).start()
        with Quarry(f"http://127.0.0.1:{server.server_port}") as quarry:
            assert quarry.job("newer").state is JobState.RUNNING
            for path, said in (("older", "id: String"), ("between", "502")):
                with pytest.raises(ProblemReceived) as refused:
                    quarry.job(path)
                problem = refused.value.problem
                assert (problem.status, "update this client" in str(problem.cure)) == (502, True)
                assert said in problem.detail
        server.shutdown()
