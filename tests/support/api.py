"""What tests of the HTTP side share: a small target, bodies, a server on the loopback, jobs moved by hand."""

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx2
import pytest
import uvicorn

from schemas.events import Event
from schemas.job import JobState, JobSummary, Problem, Progress, RejectView, UnitPage
from service.api.app import create_app
from service.api.problems import PROBLEM_MEDIA_TYPE
from service.api.serve import api_server
from service.settings import Settings
from service.store import PlanLease, Store, commits, jobs, migration, plans, publishing
from service.store.database import Transaction
from tests.support.plans import identity
from tests.support.store_cases import commit, lease_plan, lease_publish, lease_unit, planned

LAYERS = 4
UNKNOWN = "j-0000000000000000"
JSON = {"Content-Type": "application/json"}


def small_target(folder: Path) -> Path:
    """Write a config that names a small Llama; there are no weights and no tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "vocab_size": 128,
        "max_position_embeddings": 256,
        "dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def api_settings(folder: Path, **changes: Any) -> Settings:
    """Return settings below `folder`, where local models and source files may also lie."""
    values: dict[str, Any] = {
        "data_dir": folder / "data",
        "model_roots": (folder,),
        "source_roots": (folder,),
    }
    return Settings(**(values | changes))


def job_body(model: Path, **changes: Any) -> dict[str, Any]:
    """Return a body of two inline samples."""
    samples = [{"id": "a", "text": "the quick brown fox"}, {"id": "b", "token_ids": [1, 2, 3]}]
    body = {
        "model": str(model),
        "layers": [1, 2],
        "loss": "all",
        "source": {"kind": "inline", "samples": samples},
    }
    return body | changes


@contextmanager
def serving(settings: Settings, bind: str = "127.0.0.1", port: int = 0) -> Iterator[httpx2.Client]:
    """Serve the real application with uvicorn on a free port; yield a client of it."""
    with server_and_client(settings, bind, port) as (_, client):
        yield client


@contextmanager
def server_and_client(
    settings: Settings, bind: str = "127.0.0.1", port: int = 0
) -> Iterator[tuple[uvicorn.Server, httpx2.Client]]:
    """As `serving`, with the server, so that a test can end it."""
    app = create_app(settings)
    server = api_server(app, host=bind, port=port, log_level="warning", timeout_graceful_shutdown=5)
    listener = server.config.bind_socket()
    port = listener.getsockname()[1]
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        # A bound socket that is not yet listened on refuses connections: retry until the server listens.
        limits = httpx2.Limits(keepalive_expiry=3.0)  # the service closes a silent connection after five
        transport = httpx2.HTTPTransport(retries=20, limits=limits)
        with httpx2.Client(
            base_url=f"http://{bind}:{port}", timeout=60, trust_env=False, transport=transport
        ) as client:
            client.get("/healthz").raise_for_status()
            yield server, client
    finally:
        server.should_exit = True
        thread.join(30)
    assert not thread.is_alive()


@contextmanager
def stored(settings: Settings) -> Iterator[Store]:
    """Open the store of `settings` from beside the server, as a worker would."""
    settings.data_dir.mkdir(parents=True, exist_ok=True)
    store = Store(settings.database())
    store.write(migration.migrate)
    try:
        yield store
    finally:
        store.close()


class Looks:
    """Counts how often committed units are looked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.number, self.begun, quick = 0, threading.Semaphore(0), commits.readable

        def counted(tx: Transaction, job_id: str, *, after: int, limit: int) -> UnitPage:
            page = quick(tx, job_id, after=after, limit=limit)
            self.number += 1
            self.begun.release()
            return page

        monkeypatch.setattr(commits, "readable", counted)


def reject(position: int) -> RejectView:
    """Return a reject of a row."""
    return RejectView(
        position=position, source_id=f"row {position}", sample_id=None, reason="empty", detail="no tokens"
    )


def begin(store: Store, job_id: str) -> PlanLease:
    """Take a queued job into planning."""
    lease = lease_plan(store)
    assert lease.job_id == job_id
    store.write(
        plans.set_identity, lease, identity(layer_ids=(1, 2, LAYERS), hidden_size=64, num_layers=LAYERS)
    )
    return lease


def complete(store: Store, job_id: str, *, num_units: int = 2, rejects: int = 0) -> None:
    """Move a queued job to its end: units of one sample each, and rejects of the rows after them."""
    plan = begin(store, job_id)
    for unit in range(num_units):
        store.write(plans.add_unit, plan, planned(unit, num_samples=1), ())
    store.write(plans.finish, plan, [reject(num_units + number) for number in range(rejects)])
    for _ in range(num_units):
        commit(store, lease_unit(store, job=job_id))
    store.write(publishing.complete, lease_publish(store), None)
    assert store.read(jobs.state, job_id) is JobState.COMPLETED


def problem_of(response: httpx2.Response, status: int) -> Problem:
    """Check that an answer is a problem document of `status`, and return it."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == PROBLEM_MEDIA_TYPE
    problem = Problem.model_validate_json(response.content)
    assert problem.status == status
    return problem


def job_summary(state: JobState = JobState.RUNNING, **progress: int) -> JobSummary:
    """Return a job as the service shows it."""
    now = datetime.now(UTC)
    return JobSummary(
        id=UNKNOWN,
        state=state,
        model="org/target",
        source_kind="inline",
        progress=Progress(**progress),
        created_at=now,
        updated_at=now,
    )


@contextmanager
def answering(answers: Mapping[str, tuple[int, Any]]) -> Iterator[str]:
    """Answer GETs by path as another version, or something between, would; yield the URL."""

    class Another(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, answer = answers[self.path]
            body = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    with ThreadingHTTPServer(("127.0.0.1", 0), Another) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
        thread.join()


def events_of(response: httpx2.Response) -> list[Event]:
    """Check the form of an event stream that has ended, and return what it held."""
    events = []
    for block in response.text.split("\n\n"):
        lines = [line for line in block.splitlines() if not line.startswith(":")]
        if lines:
            fields = dict(line.split(": ", 1) for line in lines)
            event = Event.model_validate_json(fields["data"])
            assert (fields["id"], fields["event"]) == (str(event.id), event.kind)
            events.append(event)
    return events
