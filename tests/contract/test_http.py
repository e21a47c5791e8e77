"""The HTTP contract, spoken to a real server on the loopback with a real store behind it."""

import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from schemas.events import Event
from schemas.job import JobState, JobView, Problem
from schemas.names import job_id_from_key, manifest_path
from service.client import Client
from service.errors import StoreUnavailable
from service.problems import PROBLEM_MEDIA_TYPE
from service.settings import Settings
from service.store import Store
from tests.support.api import (
    api_settings,
    begin,
    complete,
    job_body,
    server_and_client,
    serving,
    small_target,
    stored,
)

UNKNOWN = "j-0000000000000000"
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    return api_settings(tmp_path_factory.mktemp("http"), max_body_bytes=100_000)


@pytest.fixture(scope="module")
def model(settings: Settings) -> Path:
    return small_target(settings.model_roots[0] / "model")


@pytest.fixture(scope="module")
def api(settings: Settings) -> Iterator[httpx2.Client]:
    with serving(settings) as client:
        yield client


@pytest.fixture
def store(settings: Settings) -> Iterator[Store]:
    """The store behind the server; jobs left by earlier tests are ended, so that a lease is of this test's job."""
    with stored(settings) as store:
        for row in store.jobs(limit=200)[0]:
            if row.state in {JobState.QUEUED, JobState.RUNNING, JobState.PUBLISHING}:
                store.cancel(row.id)
        yield store


@pytest.fixture
def job(api: httpx2.Client, store: Store, model: Path) -> JobView:
    """A job that is queued."""
    return JobView.model_validate(api.post("/extract", json=job_body(model)).json())


def problem_of(response: httpx2.Response, status: int) -> Problem:
    """Check that an answer is a problem document of `status`, and return it."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == PROBLEM_MEDIA_TYPE
    problem = Problem.model_validate_json(response.content)
    assert problem.status == status
    return problem


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


# POST /extract


def test_an_accepted_job_is_queued_and_can_be_read_where_the_answer_says(api: httpx2.Client, model: Path):
    response = api.post("/extract", json=job_body(model))
    assert response.status_code == 202
    view = JobView.model_validate(response.json())
    assert view.state is JobState.QUEUED
    assert view.request.model == str(model)
    assert response.headers["location"] == f"/jobs/{view.id}"
    assert api.get(response.headers["location"]).json() == response.json()


def test_the_same_key_and_body_are_the_same_job(api: httpx2.Client, model: Path):
    key = {"Idempotency-Key": "nightly 2026-01-01"}
    first = api.post("/extract", json=job_body(model), headers=key)
    again = api.post("/extract", json=job_body(model), headers=key)
    assert (first.status_code, again.status_code) == (202, 202)
    assert again.json() == first.json()
    assert first.json()["id"] == job_id_from_key("nightly 2026-01-01")


def test_the_same_key_with_another_body_is_a_conflict(api: httpx2.Client, model: Path):
    key = {"Idempotency-Key": "taken"}
    api.post("/extract", json=job_body(model), headers=key)
    problem = problem_of(api.post("/extract", json=job_body(model, loss="last_turn"), headers=key), 409)
    assert problem.type == "urn:quarry:idempotency-conflict"
    assert problem.field == "Idempotency-Key"


def test_without_a_key_every_post_is_a_job_of_its_own(api: httpx2.Client, model: Path):
    ids = {api.post("/extract", json=job_body(model)).json()["id"] for _ in range(3)}
    assert len(ids) == 3


def test_a_repeated_post_finds_its_job_even_when_the_source_is_gone(api: httpx2.Client, model: Path):
    source = model.parent / "once.jsonl"
    source.write_text('{"text": "hello"}\n')
    body = job_body(model, source={"kind": "file", "path": str(source)})
    key = {"Idempotency-Key": "the source is gone"}
    first = api.post("/extract", json=body, headers=key)
    source.unlink()
    assert api.post("/extract", json=body, headers=key).json() == first.json()


@pytest.mark.parametrize("key", ["", "x" * 256, "tab\there", "caf\u00e9"])
def test_a_key_that_is_not_short_printable_ascii_is_refused(api: httpx2.Client, model: Path, key: str):
    headers = {"Idempotency-Key": key.encode("latin-1")}
    response = api.post("/extract", json=job_body(model), headers=headers)
    assert problem_of(response, 422).field == "idempotency-key"


@pytest.mark.parametrize(
    ("changes", "kind", "field"),
    [
        ({"model": "/nowhere/at/all"}, "unknown-model", "model"),
        ({"model": "not a model id"}, "unknown-model", "model"),
        ({"layers": [99]}, "unknown-layer", "layers"),
        ({"chat_template": "{% if x %}"}, "template-refused", "chat_template"),
        ({"source": {"kind": "file", "path": "/etc/hostname"}}, "source-refused", "source.path"),
        ({"source": {"kind": "file", "path": "missing.jsonl"}}, "source-refused", "source.path"),
        ({"source": {"kind": "file", "path": "nul\0.jsonl"}}, "request-error", "source.path"),
        ({"model": "./nul\0"}, "request-error", "model"),
        ({"source": {"kind": "inline", "samples": []}}, "request-error", "source.samples"),
        ({"storage": {"kompression": "none"}}, "request-error", "storage.kompression"),
    ],
)
def test_a_job_that_cannot_run_is_refused_at_once_by_field(
    api: httpx2.Client, store: Store, model: Path, changes: dict[str, Any], kind: str, field: str
):
    before = sum(store.counts().values())
    problem = problem_of(api.post("/extract", json=job_body(model) | changes), 422)
    assert (problem.type, problem.field) == (f"urn:quarry:{kind}", field)
    assert sum(store.counts().values()) == before


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[]", b"NaN", b"1" * 5000, b"[" * 50_000, b'{"model": "\\ud800"}', b"\xff", b"null"]
)
def test_bytes_that_are_no_job_are_refused_and_never_an_internal_error(api: httpx2.Client, raw: bytes):
    for path in ("/extract", "/estimate"):
        problem_of(api.post(path, content=raw, headers=JSON), 422)


def test_a_deep_document_inside_a_tool_is_refused_or_kept_but_never_an_internal_error(
    api: httpx2.Client, model: Path
):
    for depth in (50, 150, 190, 5000):
        tool = b'{"a":' * depth + b"1" + b"}" * depth
        sample = b'{"messages": [{"role": "user", "content": "x"}], "tools": [' + tool + b"]}"
        source = b'{"kind": "inline", "samples": [' + sample + b"]}"
        raw = json.dumps(job_body(model, source=0)).encode().replace(b'"source": 0', b'"source": ' + source)
        response = api.post("/extract", content=raw, headers=JSON)
        assert response.status_code in {202, 422}, (depth, response.text)
        if response.status_code == 202:
            assert api.get(response.headers["location"]).json() == response.json()


def test_only_json_is_taken_so_that_a_page_of_another_origin_cannot_post(api: httpx2.Client, model: Path):
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        raw = json.dumps(job_body(model)).encode()
        problem_of(api.post("/extract", content=raw, headers={"Content-Type": kind}), 415)
    problem_of(api.post("/extract", content=raw), 415)


def test_a_body_beyond_the_limit_is_refused_whether_it_says_its_length_or_not(
    api: httpx2.Client, store: Store
):
    def chunks() -> Iterator[bytes]:
        for _ in range(50):
            yield b" " * 10_000

    before = sum(store.counts().values())
    declared = problem_of(api.post("/extract", content=b" " * 100_001, headers=JSON), 413)
    chunked = problem_of(api.post("/extract", content=chunks(), headers=JSON), 413)
    assert declared.type == chunked.type == "urn:quarry:content-too-large"
    assert declared.cure is not None
    assert sum(store.counts().values()) == before


def test_a_declared_length_beyond_the_limit_is_refused_on_every_route(api: httpx2.Client):
    problem_of(api.post(f"/jobs/{UNKNOWN}/cancel", content=b" " * 200_000, headers=JSON), 413)
    problem_of(api.post("/nowhere", content=b" " * 200_000, headers=JSON), 413)


# POST /estimate


def test_an_estimate_refuses_what_a_job_would_be_refused_for(api: httpx2.Client, model: Path):
    assert problem_of(api.post("/estimate", json=job_body(model, layers=[99])), 422).field == "layers"
    assert problem_of(api.post("/estimate", json=job_body(model, x=1)), 422).field == "x"


# GET /jobs


def test_jobs_are_listed_newest_first_page_by_page_each_once(api: httpx2.Client, store: Store, model: Path):
    made = [api.post("/extract", json=job_body(model)).json()["id"] for _ in range(5)]
    listed: list[str] = []
    cursor: str | None = None
    while len(listed) < len(made):
        query = {"limit": 2} | ({"cursor": cursor} if cursor else {})
        page = api.get("/jobs", params=query).json()
        listed += [one["id"] for one in page["jobs"]]
        cursor = page["next_cursor"]
    assert listed[: len(made)] == made[::-1]
    assert len(set(listed)) == len(listed)


def test_jobs_are_listed_by_state(api: httpx2.Client, store: Store, job: JobView):
    store.cancel(job.id)
    assert job.id in {one["id"] for one in api.get("/jobs", params={"state": "cancelled"}).json()["jobs"]}
    assert job.id not in {one["id"] for one in api.get("/jobs", params={"state": "queued"}).json()["jobs"]}


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("limit=0", "limit"),
        ("limit=201", "limit"),
        ("state=done", "state"),
        ("x=1", "x"),
        ("cursor=nonsense", "cursor"),
    ],
)
def test_a_listing_that_cannot_be_given_names_the_parameter(api: httpx2.Client, query: str, field: str):
    assert problem_of(api.get(f"/jobs?{query}"), 422).field == field


# Every route of one job

ROUTES_OF_A_JOB = [
    ("GET", ""),
    ("POST", "/cancel"),
    ("POST", "/resume"),
    ("GET", "/events"),
    ("GET", "/shards"),
    ("GET", "/manifest"),
    ("GET", "/rejects"),
]


@pytest.mark.parametrize(("method", "path"), ROUTES_OF_A_JOB)
@pytest.mark.parametrize(
    "job_id", [UNKNOWN, "nonsense", "j-XYZ", "%00", "j-0000000000000000%0a", "..%2f..%2fetc"]
)
def test_a_job_that_does_not_exist_is_not_found(api: httpx2.Client, method: str, path: str, job_id: str):
    assert problem_of(api.request(method, f"/jobs/{job_id}{path}"), 404).type == "urn:quarry:not-found"


@pytest.mark.parametrize(("method", "path"), ROUTES_OF_A_JOB)
def test_an_unknown_parameter_is_refused_by_name(api: httpx2.Client, job: JobView, method: str, path: str):
    assert problem_of(api.request(method, f"/jobs/{job.id}{path}?verbose=1"), 422).field == "verbose"


@pytest.mark.parametrize("verb", ["cancel", "resume"])
def test_a_verb_takes_no_body_but_an_empty_object(api: httpx2.Client, job: JobView, verb: str):
    assert problem_of(api.post(f"/jobs/{job.id}/{verb}", json={"force": True}), 422).field == "force"
    problem_of(api.post(f"/jobs/{job.id}/{verb}", content=b"{", headers=JSON), 422)


# Cancel and resume


def test_a_cancelled_job_is_resumed_and_may_be_cancelled_twice(api: httpx2.Client, job: JobView):
    assert api.post(f"/jobs/{job.id}/cancel").json()["state"] == "cancelled"
    assert api.post(f"/jobs/{job.id}/cancel").json()["state"] == "cancelled"
    assert api.post(f"/jobs/{job.id}/resume", json={}).json()["state"] == "queued"
    assert api.get(f"/jobs/{job.id}").json()["state"] == "queued"


def test_a_verb_that_the_state_does_not_allow_is_a_conflict(api: httpx2.Client, store: Store, job: JobView):
    assert problem_of(api.post(f"/jobs/{job.id}/resume"), 409).type == "urn:quarry:illegal-move"
    complete(store, job.id)
    assert problem_of(api.post(f"/jobs/{job.id}/cancel"), 409).cure is not None
    problem_of(api.post(f"/jobs/{job.id}/resume"), 409)


# What a job wrote


def test_shards_and_rejects_come_in_pages_without_gap_or_double(
    api: httpx2.Client, store: Store, job: JobView
):
    complete(store, job.id, units=5, rejects=5)
    for name, path_or_position in (("shards", "unit"), ("rejects", "position")):
        found: list[int] = []
        after: int | None = -1
        while after is not None:
            page = api.get(f"/jobs/{job.id}/{name}", params={"after": after, "limit": 2}).json()
            found += [one[path_or_position] for one in page[name]]
            assert len(page[name]) <= 2
            after = page["next_after"]
        assert found == sorted(set(found))
        assert len(found) == 5


def test_a_shard_is_told_with_its_receipt(api: httpx2.Client, store: Store, job: JobView):
    complete(store, job.id, units=1)
    (shard,) = api.get(f"/jobs/{job.id}/shards").json()["shards"]
    assert shard == {
        "path": f"data/{job.id}/train-00000.parquet",
        "sha256": "a" * 64,
        "bytes": 1000,
        "rows": 1,
        "tokens": 4,
        "unit": 0,
        "epoch": 1,
    }


@pytest.mark.parametrize("name", ["shards", "rejects"])
@pytest.mark.parametrize("query", ["limit=0", "limit=10001", "after=-2", f"after={2**63}", "after=x"])
def test_a_page_out_of_bounds_is_refused(api: httpx2.Client, job: JobView, name: str, query: str):
    assert problem_of(api.get(f"/jobs/{job.id}/{name}?{query}"), 422).field == query.partition("=")[0]


def test_a_manifest_is_sent_as_it_stands_once_the_job_is_complete(
    api: httpx2.Client, store: Store, settings: Settings, job: JobView
):
    """1. Queued: a conflict. 2. Complete, but deleted here: not found. 3. Complete: the file's own bytes."""
    assert problem_of(api.get(f"/jobs/{job.id}/manifest"), 409).type == "urn:quarry:illegal-move"
    complete(store, job.id)
    problem_of(api.get(f"/jobs/{job.id}/manifest"), 404)
    path = settings.dataset_dir(job.id) / manifest_path(job.id)
    path.parent.mkdir(parents=True)
    path.write_bytes(b'{"complete": true}')
    response = api.get(f"/jobs/{job.id}/manifest")
    assert (response.status_code, response.headers["content-type"]) == (200, "application/json")
    assert response.content == b'{"complete": true}'


# Events


def test_a_finished_job_sends_all_its_events_in_order_and_ends(
    api: httpx2.Client, store: Store, job: JobView
):
    complete(store, job.id)
    response = api.get(f"/jobs/{job.id}/events")
    assert response.headers["content-type"].startswith("text/event-stream")
    events = events_of(response)
    assert [event.id for event in events] == list(range(1, len(events) + 1))
    assert events[0].state is JobState.QUEUED
    assert events[-1].state is JobState.COMPLETED


def test_last_event_id_resumes_after_it_and_wins_over_the_query(
    api: httpx2.Client, store: Store, job: JobView
):
    complete(store, job.id)
    path = f"/jobs/{job.id}/events"
    everything = events_of(api.get(path))
    middle = everything[3].id
    assert events_of(api.get(path, headers={"Last-Event-ID": str(middle)})) == everything[4:]
    assert events_of(api.get(path, params={"after": middle})) == everything[4:]
    assert (
        events_of(api.get(path, params={"after": 0}, headers={"Last-Event-ID": str(middle)}))
        == everything[4:]
    )
    assert events_of(api.get(path, params={"after": everything[-1].id})) == []


def test_events_are_sent_while_the_job_goes_on(api: httpx2.Client, store: Store, job: JobView):
    """1. A client listens to a queued job. 2. Each thing that happens reaches it. 3. The stream ends with the job."""
    with Client(str(api.base_url)) as client:
        events = client.follow(job.id)
        assert next(events).state is JobState.QUEUED
        begin(store, job.id)
        assert next(events).state is JobState.RUNNING
        store.cancel(job.id)
        rest = list(events)
    assert rest[-1].state is JobState.CANCELLED


def test_a_blocked_job_ends_its_stream_and_a_resumed_one_goes_on_from_there(
    api: httpx2.Client, store: Store, job: JobView
):
    begin(store, job.id)
    waits = Problem(type="urn:quarry:disk-full", title="The disk is full", status=507, detail="no space")
    store.block_job(job.id, waits)
    before = events_of(api.get(f"/jobs/{job.id}/events"))
    assert (before[-1].state, before[-1].problem) == (JobState.BLOCKED, waits)
    store.resume(job.id)
    store.cancel(job.id)
    after = events_of(api.get(f"/jobs/{job.id}/events", headers={"Last-Event-ID": str(before[-1].id)}))
    assert [event.state for event in after] == [JobState.QUEUED, JobState.CANCELLED]


@pytest.mark.parametrize("value", ["x", "-1", str(2**63)])
def test_an_event_id_that_cannot_be_is_refused(api: httpx2.Client, job: JobView, value: str):
    path = f"/jobs/{job.id}/events"
    assert problem_of(api.get(path, headers={"Last-Event-ID": value}), 422).field == "last-event-id"
    assert problem_of(api.get(path, params={"after": value}), 422).field == "after"


def test_open_streams_end_with_the_server_and_do_not_hold_it_up(tmp_path: Path):
    """1. A client listens to a job that does not move. 2. The server is told to end. 3. The stream ends in order."""
    with server_and_client(api_settings(tmp_path)) as (server, api):
        made = api.post("/extract", json=job_body(small_target(tmp_path / "model"))).json()
        with api.stream("GET", f"/jobs/{made['id']}/events") as response:
            lines = response.iter_lines()
            assert next(lines) == "event: state"
            server.end()
            assert sum(line.startswith("data: ") for line in lines) == 1


# Health, metrics, and what is nowhere


def test_health_and_readiness_are_ok(api: httpx2.Client):
    assert api.get("/healthz").json() == {"status": "ok"}
    assert api.get("/readyz").json() == {"status": "ok"}


def test_a_data_folder_that_is_gone_is_not_ready(tmp_path: Path):
    settings = api_settings(tmp_path, database_url=f"sqlite:///{tmp_path / 'elsewhere.db'}")
    with serving(settings) as api:
        api.get("/readyz").raise_for_status()
        settings.data_dir.rmdir()
        assert problem_of(api.get("/readyz"), 503).type == "urn:quarry:store-unavailable"
        api.get("/healthz").raise_for_status()


def test_a_database_of_another_version_is_not_ready(tmp_path: Path):
    settings = api_settings(tmp_path)
    with serving(settings) as api:
        with sqlite3.connect(settings.data_dir / "quarry.db") as database:
            database.execute("UPDATE alembic_version SET version_num = '9999'")
        database.close()
        problem = problem_of(api.get("/readyz"), 503)
        assert problem.type == "urn:quarry:store-unavailable"
        assert "9999" in problem.detail


def test_a_database_that_does_not_answer_is_not_ready(tmp_path: Path):
    store = Store(f"sqlite:///{tmp_path}")
    with pytest.raises(StoreUnavailable):
        store.check()
    store.close()


def test_metrics_count_requests_jobs_and_what_was_written(api: httpx2.Client, store: Store, job: JobView):
    complete(store, job.id, units=3, rejects=1)
    response = api.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    values = dict(line.rsplit(" ", 1) for line in response.text.splitlines() if not line.startswith("#"))
    counts, totals = store.counts(), store.totals()
    for state in JobState:
        assert float(values[f'quarry_jobs{{state="{state}"}}']) == counts[state]
    assert float(values["quarry_samples_written_total"]) == totals.samples_written > 0
    assert float(values["quarry_samples_rejected_total"]) == totals.samples_rejected > 0
    assert float(values["quarry_tokens_written_total"]) == totals.tokens_written > 0
    assert float(values["quarry_bytes_written_total"]) == totals.bytes_written > 0
    assert float(values['http_requests_total{handler="/extract",method="POST",status="202"}']) > 0


def test_what_is_nowhere_and_what_is_done_wrongly_are_problems_too(api: httpx2.Client):
    assert problem_of(api.get("/nowhere"), 404).type == "urn:quarry:not-found"
    wrong = api.delete("/jobs")
    assert problem_of(wrong, 405).type == "urn:quarry:method-not-allowed"
    assert wrong.headers["allow"] == "GET"
    for path in ("/docs", "/redoc"):
        problem_of(api.get(path), 404)
